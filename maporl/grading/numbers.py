r"""Numbers as people and models write them, read exactly. Every rule is a doctest."""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

LONGEST_ANSWER = 1000
"""The most characters of an answer that is read."""
_APPROXIMATELY = re.compile(
    r"(?:(?:(?:about|approximately|around|roughly|exactly|only|just)\s|≈|~|\\approx\b)\s*)+", re.I
)
_LETTERS = "[A-Za-zÀ-ÖØ-öø-ÿ]"
CURRENCIES = "$€£¥₹₩₽"
_CODES = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥", "INR": "₹", "Rs": "₹", "Rs.": "₹"}
_CODE = re.compile(r"(?:[A-Z]{1,2}\$|USD|EUR|GBP|JPY|INR|Rs\.?)\s*(?=[-.0-9])")
_QUANTITY = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:[{CURRENCIES}]\s*)?(?P<inner>[-+]?)"
    r"(?:"
    r"\\[dt]?frac\s*\{\s*(?P<top>-?[0-9]+)\s*\}\s*\{\s*(?P<bottom>-?[0-9]+)\s*\}"
    r"|(?:(?P<whole>[0-9]+)[ ]+)?(?P<over>[0-9]+)\s*/\s*(?P<under>[0-9]+)"
    r"|(?P<decimal>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?(?<=[0-9])(?:[eE][-+]?[0-9]{1,3})?)"
    r")"
    r"(?:\s*\((?P<name>[A-Za-z]+(?:[- ][A-Za-z]+)?)\))?"
    rf"(?:\s*[%{CURRENCIES}]|\s*°[CF]?)?(?P<space>\s*)(?P<unit>(?:(?<![%°{CURRENCIES}]){_LETTERS}+[.²³]?(?:\s+|/|$)){{0,4}})"
)
_MAGNITUDES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_words = str.split
_SMALL = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
_VALUES = {word: value for value, word in enumerate(_SMALL)} | {word: 10 * n for n, word in enumerate(_TENS, 2)}
_PARTS = {"half": 2, "halve": 2, "third": 3, "fourth": 4}
_PARTS |= {word: n for n, word in enumerate(_words("quarter fifth sixth seventh eighth ninth tenth"), 4)}
_UNDER_100 = rf"(?:(?:{'|'.join(_TENS)})(?:[- ](?:{'|'.join(_SMALL[1:10])}))?|{'|'.join(reversed(_SMALL))})"
_UNDER_1000 = rf"(?:(?:{'|'.join(_SMALL[1:])})[- ]hundred(?:(?: and)? {_UNDER_100})?|{_UNDER_100})"
_SPELLED = re.compile(  # as in "two hundred and five thousand", "two thirds" and "two and one half"
    rf"(?P<sign>minus |negative )?(?P<count>(?:{_UNDER_1000} (?:trillion|billion|million|thousand),? (?:and )?)*"
    rf"{_UNDER_1000}(?: (?:trillion|billion|million|thousand|dozen))?)"
    rf"(?:(?: and (?P<top>{_UNDER_100}))?[- ](?P<part>{'|'.join(_PARTS)})s?)?(?: (?P<unit>[a-z]+(?: [a-z]+){{0,3}}))?"
)
_SPELLED_IN = re.compile(
    rf"(?i)\b(?:{_UNDER_1000}(?: (?:trillion|billion|million|thousand|dozen),?(?: and)? ?)?)+(?<! )\b"
)
_OF_A = re.compile(rf"^(?=half\b)|\ban? (?=(?:{'|'.join([*_PARTS, *_MAGNITUDES])})s?\b)")
_FOREIGN = re.compile(  # 1.234.567, 1.234,5 and 1'234, and 12,34,567 as in India
    r"(?P<whole>[0-9]{1,3}(?:(?:\.[0-9]{3}){2,}|(?:\.[0-9]{3})+(?=,[0-9])|(?:['’_][0-9]{3})+)|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3})"
    r"(?P<part>,[0-9]{1,2}(?![0-9])|,[0-9]{4,}|\.[0-9]+)?(?![0-9.,_'’])"
)
_SHORT_UNITS = frozenset(  # units of two letters, and units of three that may follow a number without a blank
    _words(
        "km cm mm nm µm kg mg ml dl cl lb oz ft in yd mi hr am pm us of an at kb mb gb tb hz pt qt cc sq cu "
        "hrs lbs min sec mph kmh kph kwh gal usd eur gbp"
    )
)
_NO_UNIT = re.compile(  # a word of arithmetic in the plural is a noun, such as points and roots
    f"(?:{'|'.join([*_SMALL, *_TENS, *_MAGNITUDES, *_PARTS])}|eleventh|twelfth|twentieth|hundredth|thousandth"
    "|millionth|billionth|lakh|crore|mil|mille|milliard|score|pair|couple|permille|promille)s?"
    "|halves|gross|tausend|millones|millionen|doubled?|twice|tripled?|thrice|halved|quadrupled?|nil|nought|infinity"
    "|plus|minus|times?|over|divided|multiplied|added|subtracted|squared|cubed|factorial|root|sqrt|modulo|mod|power|raised"
    "|point|negative|positive|below|under|sin|cos|tan|log|exp|alpha|beta|gamma|theta|lambda|omega|and|but|not|nor|n?either"
    "|both|versus|then|instead|rather|wait|actually|correction|sorry|never|cannot|unless|except|without|wrong|incorrect"
    "|false|untrue|because|since|if|when|where|while|which|that|therefore|hence|thus|however|although|maybe|perhaps"
    "|possibly|too|than|equals?|less|fewer"
)
# "5 times" answers how often where no other number follows
_ALONE = re.compile(r"(?:times?|point)(?=$| an? (?:hour|day|week|month|year)\b| (?:per|in total|altogether)\b)")


def number(text: str) -> Fraction | None:
    r"""The number that ``text`` stands for, exactly, or None if it is anything else than one number.

    It may have commas between thousands, decimals, a power of ten, a currency, a percent sign, a fraction, a mixed
    number, or "about" in front, or be a word up to ninety-nine.

    >>> [str(number(t)) for t in ("1,234", "3.0", r"\frac{1}{2}", "-3/4", "$5", "12 red apples", r"7\%", "0.50")]
    ['1234', '3', '1/2', '-3/4', '5', '12', '7', '1/2']
    >>> [str(number(t)) for t in ("1e3", "1/2 cup", "–5", "about 5", "5 (five)", "3 1/2", "5€", "$5$ apples", "12km/h")]
    ['1000', '1/2', '-5', '5', '5', '7/2', '5', '5', '12']
    >>> [str(number(t)) for t in ("four", "Forty-two", r"\mbox{ten}")]
    ['4', '42', '10']
    >>> [number(t) for t in ("2 + 3", "10-4", "1,23", "apples", "", "1 or 2", r"\frac{1}{0}", "9" * 5000)]
    [None, None, None, None, None, None, None, None]

    A unit of up to four words may follow. A magnitude such as "thousand" counts. A variable is not a unit, and neither
    is a word that changes the number or takes it back.

    >>> [str(number(t)) for t in ("5 thousand", "2 dozen eggs", "$1.5 million", "5 times", "5 km per hour")]
    ['5000', '24', '1500000', '5', '5']
    >>> [number(t) for t in ("5 minus three", "5 squared", "5 halves", "5 or six", "5 not six", "5x", "5 k", "5 (six)")]
    [None, None, None, None, None, None, None, None]
    """
    if len(text) > 2 * LONGEST_ANSWER:
        return None
    text = plain(text)
    text = text[match.end() :] if (match := _APPROXIMATELY.match(text)) else text
    if text[:1].isalpha() and (spelled := _spelled(text)) is not None:
        return spelled
    match = None if "\n" in text or len(text) > LONGEST_ANSWER else _QUANTITY.fullmatch(text)
    if not match and (foreign := _FOREIGN.search(text)):
        digits = re.sub(r"\D", "", foreign["whole"]) + "." + (foreign["part"] or ".0")[1:]
        match = _QUANTITY.fullmatch(text[: foreign.start()] + digits + text[foreign.end() :])
    if not match or (match["sign"] and match["inner"]):
        return None
    scale = _scale(match["unit"] or "", attached=not match["space"])
    if match["decimal"] is not None:
        value = Fraction(match["decimal"].replace(",", ""))
    else:
        top, bottom = int(match["top"] or match["over"]), int(match["bottom"] or match["under"])
        if not bottom or (match["whole"] and top >= bottom):
            return None
        value = int(match["whole"] or 0) + Fraction(top, bottom)
    name = match["name"]
    if scale is None or (name and _spelled(name) != value and _scale(name, attached=False) != 1):
        return None
    return value * scale * (-1 if "-" in (match["sign"], match["inner"]) else 1)


_PAIRS = ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$"), ("<", ">"), ('"', '"'), ("“", "”"))
_OPENINGS = frozenset(opening[0] for opening, _ in _PAIRS)
_BLANKS_AT_THE_END = (r"\,", r"\;", r"\:", r"\!", r"\quad", r"\qquad", "\\")


@lru_cache(256)
def trim(text: str) -> str:
    r"""``text`` without the marks around it: blanks, emphasis, signs of LaTeX mathematics, closing punctuation.

    >>> trim("**$5$**"), trim(r"\(x\)"), trim("<18>"), trim("5..")
    ('5', 'x', '18', '5..')
    """
    text = text.strip().strip("*_`").strip()
    for opening, closing in _PAIRS if text[:1] in _OPENINGS else ():
        inside = text[len(opening) : -len(closing)] if text.startswith(opening) else ""
        if inside and text.endswith(closing) and closing not in inside:
            text = inside.strip()
    while text.endswith(_BLANKS_AT_THE_END):  # their comma is not punctuation
        text = text[: text.rindex("\\")].rstrip()
    text = text[:-1] if text.endswith(".") and not text.endswith("..") else text.rstrip(",;:")
    return text.strip().strip("*_`").strip()


_WIDE = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_WIDE |= dict.fromkeys(map(ord, "\u2009\u202f\u00a0\u3000"), " ")
_WIDE |= dict(zip(map(ord, "−、。⁄º∕∶¢∠"), ("-", ",", ".", "/", "°", "/", ":", " cents", "\\angle "), strict=True))
_WIDE |= {code: unicodedata.normalize("NFKC", chr(code)) for code in range(0x1D400, 0x1D800)}  # letters of mathematics
_WIDE |= dict.fromkeys([0x2611, 0x2705, 0x2713, 0x2714, 0xFE0F, *range(0x1F300, 0x1FB00)], "")  # pictures
_ODD_DIGIT = re.compile(r"(?![0-9])\d")
_WIDE |= {
    code: " {}/{}".format(*Fraction(unicodedata.numeric(chr(code))).limit_denominator(10).as_integer_ratio())
    for code in (*range(ord("¼"), ord("¾") + 1), *range(ord("⅐"), ord("⅞") + 1))
}
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_ROOT_SIGN = re.compile(r"([√∛∜])\s*([0-9]+(?:\.[0-9]+)?|[A-Za-zπ])?")
_LAYOUT = re.compile(
    r"(?<!\\)(?:\\(?:displaystyle|textstyle|scriptstyle|scriptscriptstyle|limits|nolimits|mathstrut|strut|relax|null|hfill|nonumber|notag"
    r"|tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|rm|it|sf|tt|bfseries|itshape|centering|hline|medspace|thinspace"
    r"|thickspace|negthinspace|enspace|quad|qquad|mathopen|mathclose|mathrel|mathbin|mathord|mathop|protect|noindent)(?![A-Za-z])"
    r"|\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*(?P<dot>\.)?"
    r"|\\(?:[hv]?phantom|hspace\*?|vspace\*?|mspace|mskip|color|label|tag\*?)\s*(?:\{[^{}]*\}|(?=-))|\\[,;:> /]|~)"
)
_WORDS = r"\\(?:text(?:bf|rm|it|sf|tt|normal|up|md|sc)?|mbox|hbox|emph|mathrm|operatorname\*?)\s*(?=\{)"
_STYLES = (
    r"\\(?:math(?:bf|it|sf|tt|normal)|boldsymbol|bm|pmb|underline|ensuremath|boxed|fbox|textcolor\s*\{[^{}]*\}"
    r"|colorbox\s*\{[^{}]*\})\s*(?=\{)"
)
_WORDS_IN = re.compile(_WORDS + r"\{([^{}]*)\}")
_STYLED = re.compile(_STYLES + r"\{([^{}]*)\}")
_WRAPPER = re.compile(f"{_WORDS}|{_STYLES}")
_BLANK = r"(?:\\[,;:! ]|~|\{[,\s]\}|[ \u2009\u202f\u00a0])"
_GROUPS = re.compile(rf"(?<![0-9.,_^])([1-9][0-9]{{0,2}})((?:{_BLANK}[0-9]{{3}})+)(?![0-9])(?!\s*/)")
_TYPESET = re.compile(r"[\\{$~^]")
_PAIR = re.compile(r"(?<!\\)\$([^$]*?)(?<!\\)\$")
_NAMED = frozenset(_words("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp gcd lcm max min"))


@lru_cache(64)  # the same words are read several times in one grading
def plain(text: str) -> str:
    r"""``text`` without what only sets the type. Labels and answers are read through this alone.

    >>> plain(r"$5\text{ km}$"), plain(r"\frac12"), plain("$5$ apples"), plain("−1{,}000"), plain(r"45^\circ")
    ('5  km', '\\frac{1}{2}', '5 apples', '-1000', '45°')
    >>> plain(r"\displaystyle\left(\dfrac{1}{2},\;3\right)"), plain(r"10\,000"), plain(r"\mathbf{5}"), plain("$69$,$84$")
    ('(\\frac{1}{2}, 3)', '10000', '5', '69,84')
    >>> plain("１８"), plain("0{,}5"), plain("1 234 567"), plain("3 125/250"), plain(r"\phantom{0}7"), plain("{12}")
    ('18', '0.5', '1234567', '3 125/250', '7', '12')
    """  # noqa: E501
    if not text.isascii():
        text = _ODD_DIGIT.sub(lambda match: str(int(match[0])), unicodedata.normalize("NFC", text).translate(_WIDE))
        text = _ROOT_SIGN.sub(lambda root: _ROOTS[root[1]] + (f"{{{root[2]}}}" if root[2] else ""), text)
    if _TYPESET.search(text):
        text = _without_typesetting(text)
    elif _GROUPS.search(text):
        text = _GROUPS.sub(_joined, text)
    text = trim(text)
    while _is_group(text):
        text = trim(text[1:-1])
    if text[:1].isupper() and (code := _CODE.match(text)):
        text = _CODES.get(code[0].strip(), "$") + text[code.end() :]
    return re.sub(r"^–(?=\s*[$€£]?\s*[.\d])", "-", text)


def _is_group(text: str) -> bool:
    """Whether one pair of braces stands around all of ``text``."""
    if not (text.startswith("{") and text.endswith("}")):
        return False
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return match.end() == len(text)
    return False


def _without_typesetting(text: str) -> str:
    text = _GROUPS.sub(_joined, trim(text))
    if r"\rm" in text or r"\over" in text or r"\under" in text:
        text = re.sub(r"\{\s*\\rm\s+([^{}]*)\}", r"\\text{\1}", text)
        text = re.sub(r"\{([^{}]{1,30})\\over(?![A-Za-z])([^{}]{1,30})\}", r"\\frac{\1}{\2}", text)
        text = re.sub(r"\\(?:und|ov)erbrace\s*\{([^{}]*)\}\s*(?:[_^]\s*\{(?:[^{}]|\{[^{}]*\})*\})?", r"\1", text)
    if r"\begin" in text:
        text = re.sub(r"\\left\s*\\\{\s*(\\begin.*?\\end\s*\{[a-z]+\})\s*\\right\s*\.", r"\1", text, flags=re.DOTALL)
        text = re.sub(r"\\(?:\\\s*\[\s*-?[0-9.]+\s*[a-z]{2}\s*\]|cr(?![A-Za-z]))", r"\\\\", text)
    text = text.replace(r"\!", "").replace(r"\mleft", r"\left").replace(r"\mright", r"\right")
    text = _PAIR.sub(r"\1", text)
    text = re.sub(r"\{,\}(?=[0-9]{3}(?![0-9]))", ",", text)
    text = re.sub(r"(?<=[0-9])\{,\}(?=[0-9])", ".", text)
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z])|\{\s*°\s*\})|\\(?:text)?degree(?![A-Za-z])", "°", text)
    tight = (r"\left", r"\right", r"\big", r"\Big", r"\phantom")
    text = _LAYOUT.sub(lambda match: "" if match[0].startswith(tight) else " ", text)
    for _ in range(2):  # one command in the other
        text = _WORDS_IN.sub(lambda match: "\\" + match[1] + " " if match[1] in _NAMED else " " + match[1], text)
        text = _STYLED.sub(lambda one: one[1] if len(one[1]) == 1 or one[1].isdigit() else f"{{{one[1]}}}", text)
    text = _WRAPPER.sub(" ", text)  # what holds braces itself stays a group
    text = re.sub(r"\\(begin|end)\{(?:array\}\s*(?:\{[clr|@ ]*\})?|smallmatrix\})", r"\\\1{matrix}", text)
    if "^" in text or "°" in text:
        text = re.sub(r"(?<=[0-9)}])\s*\^\s*(?:o(?![A-Za-z])|\{\s*o\s*\})", "°", text)
        text = re.sub(r"(?<=[0-9])\s*\^\s*\{\s*(?:st|nd|rd|th)\s*\}", "", text)
        text = re.sub(r"°\s+(?=[CF](?![A-Za-z]))", "°", text)
    if r"\choose" in text or "frac" in text:
        text = re.sub(r"\{([^{}\\]{1,30})\\choose(?![A-Za-z])([^{}\\]{1,30})\}", r"\\binom{\1}{\2}", text)
        text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
        text = re.sub(r"(\\frac)\s*([0-9])\s*([0-9])(?![0-9])", r"\1{\2}{\3}", text)
    for written, meant in zip(_words(r"\% \$ \pounds \euro \& \# \colon"), "%$£€&#:", strict=True):
        text = text.replace(written, meant)
    return text.strip()


def _joined(match: re.Match[str]) -> str:
    return match[1] + "".join(re.findall("[0-9]{3}", match[2]))


def unit_scale(unit: str, marked: bool) -> int | None:
    r"""As :func:`_scale`, of words after an expression. A unit that is ``marked`` as text may be one letter.

    >>> unit_scale("square feet", False), unit_scale("million", False), unit_scale("or six", False), unit_scale("N", True)
    (1, 1000000, None, 1)
    """  # noqa: E501
    if re.fullmatch(r"[ap]\.?\s?m\.?", unit.strip(), re.IGNORECASE):
        return 1  # half of a day
    words = re.split(r"[\s/.]+", unit.strip(" ."))
    if marked and all(len(word) == 1 or word.lower() in _SHORT_UNITS for word in words):
        return 1 if all(word in "mghslLNJWACVFTΩ" or len(word) > 1 for word in words) else None
    return _scale(unit, attached=False)


def _scale(unit: str, attached: bool) -> int | None:
    """The factor that the words after a number stand for, or None if they are not a unit.

    ``attached``: no blank stands between the number and the words.

    >>> _scale("apples", False), _scale("million dollars", False), _scale("or so", False), _scale("m", True)
    (1, 1000000, None, None)
    """
    words = [word for word in re.split(r"[\s/.²³]+", unit) if word]
    scale = _MAGNITUDES.get(words[0].lower().removesuffix("s")) if words else None
    if scale is not None:
        words, attached = words[1:], False
    for place, word in enumerate(words):
        lower = word.lower()
        if len(word) == 1:
            fits = word in "mghslL" or (lower == "a" and place + 1 < len(words))
        elif len(word) == 2:
            fits = lower in _SHORT_UNITS
        else:
            fits = not _NO_UNIT.fullmatch(lower) or (place == 0 and _ALONE.match(unit.strip()))
        if attached and place == 0 and len(word) < 4:
            fits = lower in _SHORT_UNITS
        if not fits:
            return None
    return scale or 1


def _spelled(text: str) -> Fraction | None:
    """The number that ``text`` spells in English words, with a unit or without.

    >>> [str(_spelled(text)) for text in ("Forty-two", "a hundred and one", "a dozen", "half of a cake", "two thirds")]
    ['42', '101', '12', '1/2', '2/3']
    >>> [str(_spelled(text)) for text in ("one and a half hours", "two million", "five or six", "third")]
    ['3/2', '2000000', 'None', 'None']
    """
    match = _SPELLED.fullmatch(_OF_A.sub("one ", text.lower())) if len(text) < 200 else None
    if match is None or _scale(match["unit"] or "", attached=False) != 1:
        return None
    value = _count(match["count"])
    if match["part"]:
        part = Fraction(1, _PARTS[match["part"]])
        value = value + _count(match["top"]) * part if match["top"] else value * part
    return -value if match["sign"] else value


def _count(spelled: str) -> Fraction:
    total = group = 0
    for word in re.findall("[a-z]+", spelled):
        if word in ("hundred", "dozen"):
            group *= _MAGNITUDES[word]
        elif word in _MAGNITUDES:
            total, group = total + group * _MAGNITUDES[word], 0
        else:
            group += _VALUES.get(word, 0)  # "and" has none
    return Fraction(total + group)


def spelled_in_digits(text: str) -> str:
    """``text`` with the number that it spells in digits, if it has no others.

    >>> spelled_in_digits("She has twenty-one cats"), spelled_in_digits("one of 5"), spelled_in_digits("one of them")
    ('She has 21 cats', 'one of 5', 'one of them')
    """
    if not text.isascii() or any(sign.isdigit() for sign in text):
        return text
    text = re.sub(r"\ba dozen\b", "one dozen", text, flags=re.IGNORECASE)
    return _SPELLED_IN.sub(lambda one: one[0] if one[0].lower() == "one" else str(_count(one[0].lower())), text)


def surrounds(words: str, before: bool) -> bool:
    """Whether a number is what it is with these words before or after it.

    >>> [surrounds(words, True) for words in ("She makes", "less than", "He cannot make", "x - ")]
    [True, False, False, False]
    >>> surrounds("eggs a day", False), surrounds("or so", False)
    (True, False)
    """
    words = re.sub(rf"\bleft over\b|^ {_ALONE.pattern}", "left", words)
    kept = [word for word in re.findall(r"[^\W\d_]+", words.lower()) if word not in _KEEP]
    short = [] if before else [word for word in kept if len(word) < 3 and word not in _SHORT_UNITS]
    return is_prose(words) and not short and not any(map(_NO_UNIT.fullmatch, kept))


def is_prose(words: str) -> bool:
    """Whether ``words`` are words alone, and none of them leaves open what they are about."""
    return _WORDS_BESIDE.fullmatch(words) is not None and _CHANGES.search(words) is None


_WORDS_BESIDE = re.compile(r"(?:[^\W\d_]|[\s,:≈]|(?<=\w)[-'’.](?=\w)|(?<=s)['’](?=\s))*")
_CHANGES = re.compile(
    r"(?i)\b(?:no|or|if|none|could|might|doubt|guess|suppose|unsure|double|triple|adding|subtracting|multiplying"
    r"|dividing|question|problem|step|mistake|bound|said|complement|reciprocal|opposite|at (?:least|most)"
    r"|up to|far from|out of|each of)\b|\b(?:from|over|beyond|nor|before|after|until|almost|nearly)\s*$"
    r"|n['’]t\b|(?:^|\s)(?![aAI]\b)[A-Za-z]\s*$"
)
_KEEP = frozenset(_words(
    "that which when where while then thus therefore hence and equal equals score power a an i s is it of in on to at "
    "am pm by he be as we us my me do go she her his so"
))  # fmt: skip
