r"""Units: what of an answer is its unit, and whether two units differ. Every rule is a doctest."""

import re

from maporl.tasks.grading.numbers import plain, unit_scale

_KNOWN = {
    name: unit
    for unit, names in {
        "m": "m meter meters metre metres", "cm": "cm centimeter centimeters centimetre centimetres", "mm": "mm millimeter "  # noqa: E501
        "millimeters millimetre millimetres", "km": "km kilometer kilometers kilometre kilometres", "in": "in inch inches",  # noqa: E501
        "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mi mile miles", "s": "s sec secs second seconds",
        "min": "min mins minute minutes", "h": "h hr hrs hour hours", "day": "day days", "week": "week weeks",
        "month": "month months", "year": "year years yr yrs", "g": "g gram grams", "kg": "kg kilogram kilograms kilo kilos",  # noqa: E501
        "mg": "mg milligram milligrams", "lb": "lb lbs pound pounds", "oz": "oz ounce ounces", "ton": "ton tons tonne tonnes",  # noqa: E501
        "$": "$ dollar dollars usd", "cent": "cent cents ¢", "€": "€ euro euros eur", "£": "£ gbp", "l": "l liter liters litre litres",  # noqa: E501
        "ml": "ml milliliter milliliters", "gal": "gal gallon gallons", "°": "° degree degrees deg", "rad": "rad radian radians",  # noqa: E501
        "am": "am", "pm": "pm", "%": "% percent", "mi/h": "mph", "km/h": "kmh kph kmph",
    }.items()
    for name in names.split()
}  # fmt: skip
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyzµ"
_POWER = re.compile(r"\s*\^\s*(?:\{\s*([23])\s*\}|([23]))$")
_POWERS = {"2": "2", "3": "3", "²": "2", "³": "3"}
_ATTACHED = re.compile(r"(?<=[0-9}])\s*([A-Za-zµ][A-Za-zµ./ ²³]{0,40}(?:\^\{?[23]\}?)?)$")
_MARK = re.compile(r"(?:\\frac\s*\{\s*)?\\(?:text(?:rm|normal|bf|it|up)?|mbox|hbox|mathrm|mathit|unit|si)(?![A-Za-z])")
_UNMARKED = re.compile(
    r"\\(?:text(?:rm|normal|bf|it|up)?|mbox|hbox|mathrm|mathit|unit|si|[dt]?frac)(?![A-Za-z])|\\cdot(?![A-Za-z])|\\[,;:! ]|[{}~()]"  # noqa: E501
)
_ONE = re.compile(r"([A-Za-zµ°]+)\.?(?:\^?-?[0-9]|[²³])?")


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
        body, words, power = text[:place], _only_units(text[place:]), None
        while body != (
            body := body.rstrip(" ~").removesuffix("\\,").removesuffix("\\;").removesuffix("\\:").removesuffix("\\")
        ):
            pass
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
    plainly = _UNMARKED.sub(" ", re.sub(r"\}\s*\{", "/", tail)).replace("^ ", "^").strip(" .$")
    plainly = re.sub(r"\s*\^\s*", "^", plainly)
    names = [_ONE.fullmatch(part) for part in re.split(r"[\s/*·]+", plainly) if part]
    if not names or None in names:
        return ""
    fits = unit_scale(" ".join(name[1].rstrip(".") for name in names if name), True) == 1
    return plainly if fits else ""


def units_differ(answer: str, truth: str) -> bool:
    r"""Whether two answers have different units. "units" may be any, and one may describe the thing more closely.

    >>> units_differ("5 cm", "5 inches"), units_differ(r"5\text{ square feet}", "5 ft^2"), units_differ("80 cents", r"\$80")
    (True, False, True)
    >>> units_differ("5", "5 miles"), units_differ("5 apples", "5 miles"), units_differ("5 units", "5 miles"), units_differ("5 apples", "5")
    (False, True, False, False)
    >>> units_differ("5 wins", "5 losses"), units_differ("5 apples", "5 red apples"), units_differ("6:30 p.m.", "6:30 PM")
    (True, False, False)
    """  # noqa: E501
    mine, theirs = _words(answer), _words(truth)
    if not mine or not theirs or "unit" in mine + theirs:
        return False
    units = [unit_of(words) for words in (mine, theirs)]
    if units != [None, None]:
        return units[0] != units[1]
    names = [{_one(word) for word in re.findall(r"[^\W\d_]+", words)} for words in (mine, theirs)]
    return not (names[0] <= names[1] or names[1] <= names[0])  # "apples" and "red apples"


def _one(word: str) -> str:
    """The singular of a word, roughly.

    >>> [_one(word) for word in ("apples", "losses", "Loss", "boxes")]
    ['apple', 'loss', 'loss', 'box']
    """
    return re.sub(r"(?<=ss|sh|ch|.x)es$|(?<=[^s])s$", "", word.casefold())


def _words(text: str) -> str:
    """The unit of an answer as it is written: a sign before or after it, or words after it; or ""."""
    plainly = plain(text)
    if plainly.lstrip("- ")[:1] in ("$", "€", "£"):
        return plainly.lstrip("- ")[0]
    words = split_unit(text)[1]
    if words:
        return words
    text = plainly[-60:]
    if text[-1:] in ("°", "%", "$", "€", "£"):
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
    for word in re.findall(r"[A-Za-zµ]+|[$€£°%]|/|\^?\{?[23²³]\}?", re.sub(r"\bper\b", "/", words)):
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
