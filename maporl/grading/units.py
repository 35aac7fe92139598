r"""Units: what of an answer is its unit, and whether two units differ. Every rule is a doctest."""

import re
from fractions import Fraction
from typing import Any

from maporl.grading.numbers import CURRENCIES, plain, unit_scale

_KNOWN = {
    name: unit
    for unit, names in {
        "m": "m meter meters metre metres", "cm": "cm centimeter centimeters centimetre centimetres", "mm": "mm millimeter "  # noqa: E501
        "millimeters millimetre millimetres", "km": "km kilometer kilometers kilometre kilometres", "in": "in inch inches",  # noqa: E501
        "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mi mile miles", "s": "s sec secs second seconds",
        "min": "min mins minute minutes", "h": "h hr hrs hour hours", "day": "day days", "week": "week weeks",
        "month": "month months", "year": "year years yr yrs", "g": "g gram grams", "kg": "kg kilogram kilograms kilo kilos",  # noqa: E501
        "mg": "mg milligram milligrams", "lb": "lb lbs pound pounds", "oz": "oz ounce ounces", "ton": "ton tons tonne tonnes",  # noqa: E501
        "$": "$ dollar dollars usd", "cent": "cent cents penny pennies", "pence": "pence", "€": "€ euro euros eur",
        "¥": "¥ yen jpy", "₹": "₹ rupee rupees inr", "£": "£ gbp", "l": "l liter liters litre litres",
        "ml": "ml milliliter milliliters", "gal": "gal gallon gallons", "°": "° degree degrees deg", "rad": "rad radian radians",  # noqa: E501
        "am": "am", "pm": "pm", "%": "% percent", "µm": "µm", "nm": "nm", "Ω": "Ω ohm ohms", "mi/h": "mph", "km/h": "kmh kph kmph",  # noqa: E501
    }.items()
    for name in names.split()
}  # fmt: skip
_SIZES: dict[str, tuple[int, Any]] = {
    name: (kind, ("number", Fraction(size)))
    for kind, sizes in enumerate([
        "nm 1e-9 µm 1e-6 mm 1e-3 cm 1e-2 m 1 km 1e3 in .0254 ft .3048 yd .9144 mi 1609.344",
        "s 1 min 60 h 3600 day 86400 week 604800",
        "mg 1e-3 g 1 kg 1e3 oz 28.349523125 lb 453.59237", "month 1 year 12", "ml 1e-3 l 1", "cent .01 $ 1", "pence .01 £ 1", "° 1",  # noqa: E501
    ])
    for name, size in zip(sizes.split()[::2], sizes.split()[1::2], strict=True)
}  # fmt: skip
"""What is measured by a unit, and its size."""
_SIZES["rad"] = (_SIZES["°"][0], ("div", ("number", Fraction(180)), ("symbol", "π")))
_COMPOUND = re.compile(r"([0-9]+)\s*([A-Za-z]+)\.?,?\s*(?:and\s+)?([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\.?")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyzµ"
_POWER = re.compile(r"\s*\^\s*(?:\{\s*([23])\s*\}|([23]))$")
_POWERS = {"2": "2", "3": "3", "²": "2", "³": "3"}
_ATTACHED = re.compile(r"(?<=[0-9}])\s*([A-Za-zµ][A-Za-zµ./ ²³]{0,40}(?:\^\{?[23]\}?)?)$")
_MARK = re.compile(
    r"\\Omega(?![A-Za-z])|(?:\\frac\s*\{\s*|\\mu\s*)?\\(?:text(?:rm|normal|bf|it|up)?|mbox|hbox|mathrm|mathit|unit|si)(?![A-Za-z])"
)
_UNMARKED = re.compile(
    r"\\(?:text(?:rm|normal|bf|it|up)?|mbox|hbox|mathrm|mathit|unit|si|[dt]?frac)(?![A-Za-z])|\\cdot(?![A-Za-z])|\\[,;:! ]|[{}~()]"  # noqa: E501
)
_WORD = re.compile(rf"[A-Za-zµΩ]+|[{CURRENCIES}°%]|/|" + r"\^?\{?[23²³]\}?")
_ONE = re.compile(r"([A-Za-zµ°Ω]+)\.?(?:\^?-?[0-9]|[²³])?")


def split_unit(text: str) -> tuple[str, str]:
    r"""``text`` without the unit at its end, and the unit as it is written; or ``text`` and "".

    >>> split_unit(r"5\sqrt{2}\text{ m}"), split_unit(r"99\pi square inches"), split_unit(r"12\sqrt{13}\mbox{ inches}^2")
    (('5\\sqrt{2}', 'm'), ('99\\pi', 'square inches'), ('12\\sqrt{13}', 'inches^2'))
    >>> split_unit(r"2\text{ and }3"), split_unit("5 or six"), split_unit("x+y"), split_unit("feet")
    (('2  and 3', ''), ('5 or six', ''), ('x+y', ''), ('feet', ''))
    """  # noqa: E501
    first = next((m for m in _MARK.finditer(text[-200:]) if _only_units(text[-200:][m.start() :])), None)
    if first is not None:
        place = max(0, len(text) - 200) + first.start()
        body, words, power = re.sub(r"(?:[ ~]|\\[,;:]?)+$", "", text[:place]), _only_units(text[place:]), None
    else:
        text = plain(text)
        power = _POWER.search(text)
        whole = text[: power.start()] if power else text
        body = whole.rstrip(_LETTERS + " ./²³")
        if body.endswith("\\"):  # of a command, such as \pi
            name = re.match(r"[A-Za-z]*", whole[len(body) :])
            body = whole[: len(body) + len(name[0] if name else "")]
        words = whole[len(body) :].strip()
        if not whole[len(body) :].startswith(" ") or len(words) < 2:
            return text, ""
    if not body.strip(" \\,;:~$") or body.rstrip()[-1] in "+-*/=^_(<,":
        return text, ""
    scale = 1 if first is not None else unit_scale(words, False)
    return (text, "") if scale != 1 else (body.rstrip(), words + (f"^{power[1] or power[2]}" if power else ""))


def _only_units(tail: str) -> str:
    r"""``tail`` without LaTeX if it has only units marked as text, such as ``\text{m}/\text{s}^2``; else ""."""
    tail = re.sub(r"\\mu\s*\\[a-z]+\s*\{", r"\\text{µ", re.sub(r"\\Omega(?![A-Za-z])", "Ω", tail))
    plainly = _UNMARKED.sub(" ", re.sub(r"\}\s*\{", "/", tail)).replace("^ ", "^").strip(" .$")
    plainly = re.sub(r"\s*\^\s*", "^", plainly)
    names = [_ONE.fullmatch(part) for part in re.split(r"[\s/*·]+", plainly) if part]
    if not names or None in names:
        return ""
    fits = unit_scale(" ".join(name[1].rstrip(".") for name in names if name), True) == 1
    return plainly if fits else ""


def unit_ratio(answer: str, truth: str) -> Any:
    r"""How large the unit of an answer is in that of a label, as a tree; 1 if they are the same, or None if they differ.

    A unit that one of them leaves out is the same, "units" may be any, and one may describe the thing more closely.

    >>> unit_ratio("5 cm", "5 apples"), unit_ratio(r"5\text{ square feet}", "5 ft^2"), unit_ratio("80 euros", r"\$80")
    (None, 1, None)
    >>> unit_ratio("5 cm^2", "5 m^3"), unit_ratio("5 cm^2", "5 m^2")[0]
    (None, 'div')
    >>> unit_ratio("5", "5 miles"), unit_ratio("5 apples", "5 miles"), unit_ratio("5 units", "5 miles"), unit_ratio("5 apples", "5")
    (1, None, 1, 1)
    >>> unit_ratio("5 wins", "5 losses"), unit_ratio("5 apples", "5 red apples"), unit_ratio("6:30 p.m.", "6:30 PM")
    (None, 1, 1)
    """  # noqa: E501
    mine, theirs = _words(answer), _words(truth)
    if not mine or not theirs or "unit" in mine + theirs:
        return 1
    units = [unit_of(words) for words in (mine, theirs)]
    alone = any(not re.search(r"/|\bper\b", words) for words in (mine, theirs))
    rates = [unit and unit.split("/")[0] in (*CURRENCIES, "%", "cent") and unit.split("/")[0] for unit in units]
    if units != [None, None] and units[0] != units[1] and not (rates[0] and rates[0] == rates[1] and alone):
        (kind, size), (other, base) = (_size(unit or "") for unit in units)
        return ("div", size, base) if kind == other else None
    if units[0] is not None:
        return 1
    names = [{_one(word) for word in re.findall(r"[^\W\d_]+", words)} for words in (mine, theirs)]
    return 1 if names[0] <= names[1] or names[1] <= names[0] else None  # "apples" and "red apples"


def _size(unit: str) -> tuple[Any, Any]:
    """What is measured by a unit such as cm2 or km/h, and its size as a tree. An unknown unit measures itself."""
    match = re.fullmatch(r"([^23/]+)([23]?)(?:/([^23/]+))?", unit)
    one = ("number", Fraction(1))
    parts = match.group(1, 3) if match else (unit, "")
    (kind, size), (over, base) = (_SIZES.get(part or "", (part, one)) for part in parts)
    power = match[2] if match else ""
    return (kind, power, over), ("div", ("pow", size, ("number", Fraction(power or 1))), base)


def in_one_unit(text: str) -> str | None:
    """A length, a time or the like that is told in two units, in the larger one; or None.

    >>> in_one_unit("2 hours and 30 minutes"), in_one_unit("5 ft 6 in"), in_one_unit("2 hours and 30 cm")
    ('5/2 hours', '11/2 ft', None)
    """
    match = _COMPOUND.fullmatch(text)
    (kind, large), (other, small) = (
        _SIZES.get(_KNOWN.get(match[n].lower(), "") if match else "", (n, None)) for n in (2, 4)
    )
    if match is None or kind != other or small[1] >= large[1]:
        return None
    return f"{Fraction(match[1]) + Fraction(match[3]) * small[1] / large[1]} {match[2]}"


def _one(word: str) -> str:
    """The singular of a word, roughly.

    >>> [_one(word) for word in ("apples", "losses", "Loss", "boxes")]
    ['apple', 'loss', 'loss', 'box']
    """
    return re.sub(r"(?<=ss|sh|ch|.x)es$|(?<=[^s])s$", "", word.casefold())


def _words(text: str) -> str:
    """The unit of an answer as it is written: a sign before or after it, or words after it; or ""."""
    plainly = plain(text)
    if plainly.lstrip("-+ ")[:1] in tuple(CURRENCIES):
        return plainly.lstrip("-+ ")[0]
    body, words = split_unit(in_one_unit(plainly) or text)
    if words:
        return f"{body[-1]} {words}" if body[-1] in ("%", *CURRENCIES) else words
    text = plainly[-60:]
    if text[-1:] in ("°", "%", *CURRENCIES):
        return text[-1]
    match = _ATTACHED.search(text)
    return match[1] if match else ""


def unit_of(words: str) -> str | None:
    """A unit in one spelling if all of its words are known, but for what describes it; else None.

    >>> unit_of("square feet"), unit_of("feet^2"), unit_of("$"), unit_of("m per second"), unit_of("whole inches"), unit_of("apples")
    ('ft2', 'ft2', '$', 'm/s', 'in', None)
    """  # noqa: E501
    parts: list[str] = []
    power = ""
    words = re.sub(r"\b([ap])\.?\s?m\b\.?", r"\1m", words, flags=re.IGNORECASE)
    words = re.sub(r"\bper\s?cent(?:age points?)?\b", "percent", words, flags=re.IGNORECASE)
    for word in _WORD.findall(re.sub(r"\bper\b", "/", words)):
        if word == "/":
            parts.append("/")
        elif word.strip("^{}") in _POWERS:
            parts[-1:] = [parts[-1] + _POWERS[word.strip("^{}")]] if parts else []
        elif word.lower() in ("square", "sq", "cubic", "cu"):
            power = "2" if word.lower().startswith("sq") else "3"
        elif word.lower() in _KNOWN:
            parts.append(_KNOWN[word.lower()] + power)
            power = ""
    return "".join(parts).strip("/") or None
