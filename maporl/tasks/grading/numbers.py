r"""Numbers as people and models write them, read exactly. Every rule is a doctest."""

import ast
import operator
import re
import unicodedata
from fractions import Fraction

LONGEST_ANSWER = 1000
"""The most characters of an answer that is read."""
_APPROXIMATELY = re.compile(r"(?:(?:about|approximately|around|roughly|exactly|only|just)\s|≈|~|\\approx\b)\s*", re.I)
_LETTERS = "[A-Za-zÀ-ÖØ-öø-ÿ]"
_QUANTITY = re.compile(
    r"(?P<sign>[-+]?)\s*(?:[$€£]\s*)?(?P<inner>[-+]?)"
    r"(?:"
    r"\\[dt]?frac\s*\{\s*(?P<top>-?[0-9]+)\s*\}\s*\{\s*(?P<bottom>-?[0-9]+)\s*\}"
    r"|(?:(?P<whole>[0-9]+)[ ]+)?(?P<over>[0-9]+)\s*/\s*(?P<under>[0-9]+)"
    r"|(?P<decimal>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?(?<=[0-9])(?:[eE][-+]?[0-9]{1,3})?)"
    r")"
    r"(?:\s*\((?P<name>[A-Za-z]+(?:[- ][A-Za-z]+)?)\))?"
    rf"(?:\s*[%€$£]|\s*°[CF]?|(?P<space>\s*)(?P<unit>(?:{_LETTERS}+[.²³]?(?:\s+|/|$)){{0,4}}))"
)
_MAGNITUDES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_words = str.split
_SMALL = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
_SHORT_UNITS = frozenset(  # units of two letters, and units of three that may follow a number without a blank
    _words(
        "km cm mm nm kg mg ml dl cl lb oz ft in yd mi hr am pm us of an at kb mb gb tb hz pt qt cc sq cu "
        "hrs lbs min sec mph kmh kph kwh gal usd eur gbp"
    )
)
_NO_UNIT = re.compile(
    "(?:"
    + "|".join([*_SMALL, *_TENS, *_MAGNITUDES])
    + "|half|halves|third|quarter|fourth|fifth|sixth|seventh|eighth|ninth"
    "|tenth|eleventh|twelfth|twentieth|hundredth|thousandth|millionth|billionth|score|gross|lakh|crore|mil|mille|tausend"
    "|millones|millionen|milliard|doubled?|twice|tripled?|thrice|halved|quadrupled?|nil|nought|infinity"
    "|plus|minus|times?|over|divided|multiplied|added|subtracted|squared|cubed|factorial|root|sqrt|modulo|mod|power|raised"
    "|point|negative|positive|below|under|sin|cos|tan|log|exp|alpha|beta|gamma|theta|lambda|omega|and|but|not|nor|n?either"
    "|both|versus|then|instead|rather|wait|actually|correction|sorry|never|cannot|unless|except|without|wrong|incorrect"
    "|false|untrue|because|since|if|when|where|while|which|that|therefore|hence|thus|however|although|maybe|perhaps|possibly|too|than|equals?"
    "|less|fewer|pair|couple|permille|promille)s?"
)

_ARITHMETIC = re.compile(r"[0-9 +\-*/()]{1,100}")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


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
    if text[:1].isalpha() and (named := _NAMES.get(text.lower())) is not None:
        return Fraction(named)
    match = None if "\n" in text or len(text) > LONGEST_ANSWER else _QUANTITY.fullmatch(text)
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
    if scale is None or (name and name.lower().replace(" ", "-") != _name(value) and _scale(name, attached=False) != 1):
        return None
    return value * scale * (-1 if "-" in (match["sign"], match["inner"]) else 1)


def canonical(answer: str) -> str:
    r"""One spelling for all equal answers, so that votes and agreement can compare texts.

    A number, or arithmetic in whole numbers, becomes its value; any other text loses its case and typesetting.

    >>> canonical("1,234.0 dollars"), canonical(r"\frac{2}{4}"), canonical(" Paris. "), canonical(r"\text{Paris}")
    ('1234', '1/2', 'paris', 'paris')
    >>> canonical("5"), canonical("5€"), canonical("2+3"), canonical("7/(2*4)"), canonical("1/0+1")
    ('5', '5', '5', '7/8', '1/0+1')
    """
    value = number(answer)
    if value is None:
        value = arithmetic(plain(answer))
    return str(value) if value is not None else re.sub(r"\s+", " ", plain(answer)).lower()


_BLANKS_AT_THE_END = (r"\,", r"\;", r"\:", r"\!", r"\quad", r"\qquad", "\\")


def trim(text: str) -> str:
    r"""``text`` without the marks around it: blanks, emphasis, signs of LaTeX mathematics, closing punctuation.

    >>> trim("**$5$**"), trim(r"\(x\)"), trim("<18>"), trim("5..")
    ('5', 'x', '18', '5..')
    """
    text = text.strip().strip("*_`").strip()
    for opening, closing in (
        (r"\(", r"\)"),
        (r"\[", r"\]"),
        ("$$", "$$"),
        ("$", "$"),
        ("<", ">"),
        ('"', '"'),
        ("“", "”"),
    ):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)].strip()
    while text.endswith(_BLANKS_AT_THE_END):  # their comma is not punctuation
        text = text[: text.rindex("\\")].rstrip()
    one_stop = text.endswith(".") and not text.endswith("..")
    text = text[:-1] if one_stop else text.rstrip(",;:")
    return text.strip().strip("*_`").strip()


_WIDE = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | dict.fromkeys(
    map(ord, "\u2009\u202f\u00a0\u3000"), " "
)
_WIDE |= {ord("−"): "-", ord("、"): ",", ord("。"): "."}
_WIDE |= {
    ord(sign): f" {n}/{d}"
    for sign, n, d in (("½", 1, 2), ("⅓", 1, 3), ("⅔", 2, 3), ("¼", 1, 4), ("¾", 3, 4), ("⅛", 1, 8))
}
_LAYOUT = re.compile(
    r"(?<!\\)(?:\\(?:displaystyle|textstyle|scriptstyle|scriptscriptstyle|limits|nolimits|mathstrut|strut|relax|null|hfill|nonumber|notag"
    r"|tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|rm|it|sf|tt|bfseries|itshape|centering|medspace|thinspace"
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
        text = unicodedata.normalize("NFC", text).translate(_WIDE)
    if _TYPESET.search(text):
        text = _without_typesetting(text)
    elif _GROUPS.search(text):
        text = _GROUPS.sub(_joined, text)
    text = trim(text)
    while _is_group(text):
        text = trim(text[1:-1])
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
    text = text.replace(r"\!", "").replace(r"\mleft", r"\left").replace(r"\mright", r"\right")
    text = _PAIR.sub(r"\1", text)
    text = re.sub(r"\{,\}(?=[0-9]{3}(?![0-9]))", ",", text)
    text = re.sub(r"(?<=[0-9])\{,\}(?=[0-9])", ".", text)
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z])|\{\s*°\s*\})|\\(?:text)?degree(?![A-Za-z])", "°", text)
    text = _LAYOUT.sub(
        lambda match: "" if match[0].startswith((r"\left", r"\right", r"\big", r"\Big", r"\phantom")) else " ", text
    )
    for _ in range(2):  # one command in the other
        text = _WORDS_IN.sub(lambda match: "\\" + match[1] + " " if match[1] in _NAMED else " " + match[1], text)
        text = _STYLED.sub(
            lambda match: match[1] if len(match[1]) == 1 or match[1].isdigit() else f"{{{match[1]}}}", text
        )
    text = _WRAPPER.sub(" ", text)  # what holds braces itself stays a group
    text = re.sub(r"\\(begin|end)\{(?:array\}\s*(?:\{[clr|@ ]*\})?|smallmatrix\})", r"\\\1{matrix}", text)
    text = re.sub(r"(?<=[0-9)}])\s*\^\s*(?:o(?![A-Za-z])|\{\s*o\s*\})", "°", text)
    text = re.sub(r"(?<=[0-9])\s*\^\s*\{\s*(?:st|nd|rd|th)\s*\}", "", text)
    text = re.sub(r"°\s+(?=[CF](?![A-Za-z]))", "°", text)
    text = re.sub(r"\{([^{}\\]{1,30})\\choose(?![A-Za-z])([^{}\\]{1,30})\}", r"\\binom{\1}{\2}", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"(\\frac)\s*([0-9])\s*([0-9])(?![0-9])", r"\1{\2}{\3}", text)
    for written, meant in (
        (r"\%", "%"),
        (r"\$", "$"),
        (r"\pounds", "£"),
        (r"\euro", "€"),
        (r"\&", "&"),
        (r"\#", "#"),
        (r"\colon", ":"),
    ):
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
        return 1 if all(word in "mghslLNJWACVFT" or len(word) > 1 for word in words) else None
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
            fits = not _NO_UNIT.fullmatch(lower) or unit.strip() == "times"  # "5 times" answers how often
        if attached and place == 0 and len(word) < 4:
            fits = lower in _SHORT_UNITS
        if not fits:
            return None
    return scale or 1


def _name(value: Fraction) -> str | None:
    """A whole number below 100 in English words, or None for any other number.

    >>> _name(Fraction(5)), _name(Fraction(42)), _name(Fraction(1, 2))
    ('five', 'forty-two', None)
    """
    if value.denominator != 1 or not 0 <= value < 100:
        return None
    tens, ones = divmod(int(value), 10)
    if tens < 2:
        return _SMALL[int(value)]
    return _TENS[tens - 2] + (f"-{_SMALL[ones]}" if ones else "")


def arithmetic(text: str) -> Fraction | None:
    """The value of sums, differences, products and quotients of whole numbers; None for any other text.

    >>> str(arithmetic("2 * (3 + 4)/4")), [arithmetic(text) for text in ("1/0", "1+2**9", "2(3)", "05-1")]
    ('7/2', [None, None, None, None])
    """
    if not _ARITHMETIC.fullmatch(text):
        return None
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return None


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(node.value)  # type: ignore[arg-type]  # the regular expression lets whole numbers through only
    if isinstance(node, ast.UnaryOp):
        return -_evaluate(node.operand) if isinstance(node.op, ast.USub) else _evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise SyntaxError("no arithmetic")


_NAMES = {name: value for value in range(100) if (name := _name(Fraction(value))) is not None}
