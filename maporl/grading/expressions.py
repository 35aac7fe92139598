r"""Reads mathematics, plain or in LaTeX, into a tree; or not at all. Every rule is a doctest.

A text is read whole or not at all, because a parser that reads a part and drops the rest pays wrong answers. Nothing is
computed here. A tree is a tuple of the name of its kind and of its parts:

- ``number`` (a fraction), ``symbol`` (its name), ``add`` (trees), ``mul`` (the factors, and the divisors), ``div`` and
  ``pow`` (two trees), ``neg`` (a tree), ``call`` (the name of a function, and trees), ``factorial`` and ``degrees`` (a
  tree);
- ``tuple`` (both brackets, and trees: a point or an interval), ``set``, ``list`` (trees), ``matrix`` (its name, and
  rows of trees), ``union`` (trees), ``ratio`` (trees);
- ``relation`` (the signs between them, and trees), ``base`` (digits and the base in which they count), ``where`` (the
  relations of a set such as {x | x > 5}, as a ``relation`` or a ``list``), ``without`` (two trees, of a difference of
  sets), ``congruent`` (two trees, or None and a tree, and the modulus).
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from maporl.grading.numbers import CURRENCIES, LONGEST_ANSWER, plain

Tree = tuple[Any, ...]

DEEPEST = 40
"""Brackets may stand in one another so often."""
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+(?:\.[0-9]+|\.(?=\\overline))?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z.]))?)"
    r"|(?P<command>\\(?:[A-Za-z]+\*?|[{}|\\]))|(?P<word>[A-Za-z]+)"
    r"|(?P<sign><=|>=|!=|==|\*\*|[-+*/^_!=<>(){}\[\]|,;:&'%°√π∞≤≥≠≈±∓×·÷∪∩∈∖θαβγδλμσφω∅ℝ≡]))"
)
_SAME = {
    "\\cdot": "*", "\\times": "*", "×": "*", "·": "*", "\\ast": "*", "\\div": "/", "÷": "/", "**": "^",
    "\\le": "<=", "\\leq": "<=", "\\leqslant": "<=", "\\leqq": "<=", "≤": "<=", "\\lt": "<", "\\gt": ">", "==": "=",
    "\\ge": ">=", "\\geq": ">=", "\\geqslant": ">=", "\\geqq": ">=", "≥": ">=", "\\ne": "!=", "\\neq": "!=", "≠": "!=",
    "\\in": "∈", "\\approx": "≈", "\\cong": "≈", "\\pm": "±", "\\mp": "∓", "\\cup": "∪", "\\bigcup": "∪", "\\cap": "∩",
    "\\setminus": "∖", "\\backslash": "∖",
    "\\langle": "(", "\\rangle": ")", "\\lbrack": "[", "\\rbrack": "]", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\vert": "|", "\\lvert": "|", "\\rvert": "|",  # noqa: E501
    "\\mid": "|", "\\colon": ":", "\\pi": "π", "\\infty": "∞", "\\varnothing": "∅", "\\emptyset": "∅", "√": "\\sqrt",
    "\\theta": "θ", "\\alpha": "α", "\\beta": "β", "\\gamma": "γ", "\\delta": "δ", "\\lambda": "λ", "\\mu": "μ",
    "\\sigma": "σ", "\\phi": "φ", "\\varphi": "φ", "\\omega": "ω", "\\prime": "'", "\\degree": "°", "\\lor": ",", "\\land": ",",  # noqa: E501
    "\\wedge": ",", "\\vee": ",", "\\equiv": "≡", "\\dbinom": "\\binom", "\\tbinom": "\\binom",
}  # fmt: skip
_GREEK = frozenset("\\" + name for name in str.split(
    "epsilon varepsilon zeta eta vartheta iota kappa nu xi rho varrho tau upsilon chi psi Gamma Delta Theta "
    "Lambda Xi Pi Sigma Upsilon Phi Psi Omega hbar ell mho imath jmath odot nabla partial"
))  # fmt: skip
_FUNCTIONS = frozenset(str.split(
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth ln log lg exp sqrt "
    "gcd lcm max min abs"
))  # fmt: skip
_CLEAR = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "pi": "π"}
_CLEAR |= dict.fromkeys(str.split("infinity infty inf oo"), "∞")
_INVERTIBLE = frozenset(str.split("sin cos tan cot sec csc"))
_ACCENTS = frozenset("\\" + name for name in str.split(
    "hat bar vec dot ddot tilde overline overrightarrow widehat widetilde angle triangle measuredangle underline "
    "mathbb mathcal mathfrak mathscr"
))  # fmt: skip
_ENGLISH = frozenset(str.split("am an as at be by do go he if in is it me my no of on or so to up us we"))
_RELATIONS = frozenset(("=", "<", ">", "<=", ">=", "!=", "∈", "≈", "≡"))
_MATRICES = {"pmatrix": "matrix", "bmatrix": "matrix", "Bmatrix": "matrix", "matrix": "rows", "vmatrix": "determinant"}
_MATRICES |= dict.fromkeys(str.split("cases rcases aligned align gathered gather split"), "list")
_ALIGNED = re.compile(r"&\s*(?=[=<>≤≥≈]|\\(?:leq?|geq?|approx|equiv|in)(?![A-Za-z]))|(?<=[=<>])\s*&")
_BASED = re.compile(
    r"(-?)\s*\(?\{?\s*([0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)\s*\}?\)?"
    r"\s*(?:_\s*(?:\{\s*\(?\s*(?:base[- ]?)?\s*([0-9]{1,2}|[a-z]+)\s*\)?\s*\}|([0-9]{1,2}))"
    r"|,?\s*\(?\s*(?:in )?\s*base[- ]?\s*([0-9]{1,2}|[a-z]+)\s*\)?)"
)
_BASES = {name: n for n, name in enumerate(str.split("two three four five six seven eight nine ten eleven twelve"), 2)}
_BASES["sixteen"] = 16
_AND = re.compile(r"\s*(?:[,;]\s*)?(?:(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|&)\s*")
_BOTH = re.compile(r"^(?:either|both)(?![A-Za-z])")
_MODULO = re.compile(r"\(?\s*(?:\\[pb]?mod|(?<![A-Za-z\\])mod(?:ulo)?)(?![A-Za-z])\s*\{?\s*([0-9]+|[a-z])\s*\}?\s*\)?$")
_RATIO = re.compile(r"(?<=[0-9]) to (?=[0-9]+$)")
_TIMES_TEN = re.compile(r"(?<=[0-9])\s*[xX]\s*(?=10\s*(?:\^|\*\*|[⁰¹²³⁴-⁹⁻]))")
_PRIMES = re.compile(r"\^\s*(?:\{\s*((?:'|\\prime(?![A-Za-z])\s*)+)\}|('|\\prime(?![A-Za-z])))")
_RAISED = re.compile("[⁰¹²³⁴-⁹⁻]+")
_LOWERED = dict(zip(map(ord, "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"), "0123456789-", strict=True))
_IN_WORDS: dict[str, Tree] = dict.fromkeys(("all real numbers", "all reals", "the real numbers"), ("symbol", "ℝ"))
_IN_WORDS |= dict.fromkeys(("no solution", "no solutions", "no real solutions", "the empty set", "empty set"), ("set",))
_CURRENCY = re.compile(rf"[{CURRENCIES}]\s*(?=[-.0-9]|\\[dtc]?frac(?![A-Za-z]))|(?<=[0-9])\s*[{CURRENCIES}]")
_THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])(?!,[0-9])")
_WORD_OF_LETTERS = re.compile(r"[A-Za-z]{1,2}|[b-df-hj-np-tv-xzB-DF-HJ-NP-TV-XZ]{3}|abc|ABC")


class NotMathematics(ValueError):
    """The text is not mathematics that is read whole."""


def read(text: str, thousands: bool = True) -> Tree | None:
    r"""The tree of ``text``, or None if it is not mathematics that is read whole.

    Without ``thousands`` the commas of "1,234" are those of a list. In brackets they are anyway: (100,101) is a point.

    >>> read("x+1"), read(r"\frac12")
    (('add', ('symbol', 'x'), ('number', Fraction(1, 1))), ('div', ('number', Fraction(1, 1)), ('number', Fraction(2,
    1))))
    >>> read("101_2"), read("1, 2")
    (('base', '101', 2), ('list', ('number', Fraction(1, 1)), ('number', Fraction(2, 1))))
    >>> [read(t) for t in ("apples", "5 6", "5+", "(1", "x2", r"\unknown", r"\sqrt", "")]
    [None, None, None, None, None, None, None, None]
    """
    return None if len(text) > 2 * LONGEST_ANSWER else _read(text, thousands)


@lru_cache(1024)  # a label is read again for each answer
def _read(text: str, thousands: bool) -> Tree | None:
    text = plain(text)
    if len(text) > LONGEST_ANSWER or (not thousands and re.search(r",0[0-9]", text)):
        return None
    try:
        return _IN_WORDS.get(text.lower()) or based(text) or _Reader(text, thousands).all()
    except (NotMathematics, IndexError, ZeroDivisionError, RecursionError):
        return None


def based(text: str) -> Tree | None:
    """The tree of a number that says its base, or None.

    >>> based("2A_{16}"), based("-37_8"), based("11_{10}"), based("x_1"), based("19_8")
    (('base', '2a', 16), ('base', '-37', 8), ('number', Fraction(11, 1)), None, None)
    """
    if text.startswith("(") and text.endswith(")") and "(" not in text[1:]:
        text = text[1:-1].strip()
    match = _BASED.fullmatch(re.sub(r"(?<=[0-9]) +(?=[0-9A-Z]+\s*_)", "", " ".join(text.split())))
    if match is None:
        return None
    named = match[3] or match[4] or match[5]
    base = _BASES.get(named) or (int(named) if named.isdigit() else 0)
    digits = match[2].lower()
    if not 2 <= base <= 36 or not (digits[0].isdigit() or (base > 10 and len(digits) > 1)):
        return None
    if any(digit != "." and int(digit, 36) >= base for digit in digits):
        return None
    if base == 10:
        return ("number", Fraction(match[1] + digits))
    return ("base", match[1] + (digits.lstrip("0") or "0"), base)


class _Reader:
    """Reads the tokens of one text from left to right."""

    def __init__(self, text: str, thousands: bool) -> None:
        text = _ALIGNED.sub("", text) if "\\begin" in text else _AND.sub(", ", _BOTH.sub("", text))
        text = re.sub(r"\\mathbb\s*(?:R(?![A-Za-z])|\{\s*R\s*\})", "ℝ", text)
        text = _PRIMES.sub(r"\1\2", text)
        text = _MODULO.sub(r"\\pmod \1", _RATIO.sub(":", text))
        text = _TIMES_TEN.sub("*", _CURRENCY.sub("", text))
        if not text.isascii():
            text = _RAISED.sub(lambda match: "^{" + match[0].translate(_LOWERED) + "}", text)
        if thousands:
            text = _without_commas(text)
        self.tokens: list[tuple[str, str, bool]] = []
        self.place = self.depth = self.bars = 0
        place, end = 0, len(text.rstrip())
        while place < end:
            match = _TOKEN.match(text, place)
            if match is None:
                raise NotMathematics(text[place:])
            apart = match[0][:1].isspace()
            word = match["word"] or ""
            if word.lower() in _ENGLISH and (apart or place == 0) and text[match.end() : match.end() + 1].strip() == "":
                raise NotMathematics(word)  # "at" alone; e^{at} is mathematics
            self._add(str(match.lastgroup), match[str(match.lastgroup)], apart)
            place = match.end()

    def _add(self, kind: str, token: str, apart: bool) -> None:
        token = (_CLEAR if kind == "word" else _SAME).get(token, token)
        name = token if kind == "word" else token[1:].rstrip("*") if token.startswith("\\") else ""
        if name in _FUNCTIONS:
            kind, token = "function", name
        elif token in _GREEK or token in ("π", "∞", "∅", "ℝ", *"θαβγδλμσφω"):
            kind = "letter"
        elif kind == "word" and _WORD_OF_LETTERS.fullmatch(token):
            self.tokens += [("letter", letter, apart) for letter in token]
            return
        elif kind == "word":
            if not self.tokens or self.tokens[-1][1] not in ("{", "\\begin") or len(token) >= 20:
                raise NotMathematics(token)
            kind = "name"  # of a matrix, or in an index; anything else refuses it
        self.tokens.append((kind if kind != "command" else "sign", token, apart))

    # the tokens

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.place + ahead][1] if self.place + ahead < len(self.tokens) else ""

    def kind(self, ahead: int = 0) -> str:
        return self.tokens[self.place + ahead][0] if self.place + ahead < len(self.tokens) else ""

    def take(self) -> str:
        self.place += 1
        return self.tokens[self.place - 1][1]

    def met(self, *tokens: str) -> bool:
        """Whether one of ``tokens`` comes next. It is taken then."""
        met = self.peek() in tokens and self.place < len(self.tokens)
        self.place += met
        return met

    def expect(self, token: str) -> None:
        if not self.met(token):
            raise NotMathematics(token)

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise NotMathematics("too deep")

    # lists and relations

    def all(self) -> Tree:
        items = self.items("")
        if self.place < len(self.tokens) or not items:
            raise NotMathematics(self.peek())
        return items[0] if len(items) == 1 else ("list", *items)

    def items(self, closing: str) -> list[Tree]:
        """What stands between commas or semicolons."""
        if self.peek() == closing:
            return []
        trees = [*self.relation()]
        while self.met(",", ";"):
            trees += self.relation()
        return trees

    def relation(self) -> list[Tree]:
        """One relation, or the two of which a sign ± stands for one each."""
        start, sides, signs = self.place, [self.union()], []
        while self.peek() in _RELATIONS:
            signs.append(self.take())
            sides.append(self.union())
        tree = ("relation", tuple(signs), *sides) if signs else sides[0]
        if self.met("\\pmod"):
            if signs not in ([], ["≡"], ["="]):
                raise NotMathematics("\\pmod")
            tree = ("congruent", sides[0] if signs else None, sides[-1], self.atom())
        if not {token for _, token, _ in self.tokens[start : self.place]} & {"±", "∓"}:
            return [tree]
        return [_with_signs(tree, 1), _with_signs(tree, -1)]

    def union(self) -> Tree:
        parts = [self.sum()]
        while self.met("∪"):
            parts.append(self.sum())
        tree = parts[0] if len(parts) == 1 else ("union", *parts)
        return ("without", tree, self.sum()) if self.met("∖") else tree

    def described(self) -> Tree | None:
        r"""What stands in the braces of a set such as ``\{x \mid x > 5\}``, of real numbers; None in another set."""
        bar = 3 if (self.peek(1), self.peek(2)) == ("∈", "ℝ") else 1
        if self.kind() != "letter" or self.peek(bar) not in ("|", ":"):
            return None
        self.place += bar + 1
        items = self.nested_items("\\}")
        self.expect("\\}")
        if any(item[0] != "relation" for item in items):
            raise NotMathematics("|")
        return ("where", items[0] if len(items) == 1 else ("list", *items))

    # arithmetic

    def sum(self) -> Tree:
        self.deeper()
        terms = [self.signed()]
        while self.peek() in ("+", "-", "±", "∓"):
            sign = self.take()
            right = self.signed() if sign == "+" and self.peek() == "-" else self.product()
            terms.append(right if sign == "+" else ("neg" if sign == "-" else sign, right))
        tree = terms[0] if len(terms) == 1 else ("add", *terms)
        parts = [tree]
        while self.met(":"):
            parts.append(self.signed())
        self.depth -= 1
        return tree if len(parts) == 1 else ("ratio", *parts)

    def signed(self) -> Tree:
        sign = self.take() if self.peek() in ("-", "+", "±", "∓") and self.kind() == "sign" else "+"
        tree = self.product()
        return tree if sign == "+" else ("neg", tree) if sign == "-" else (sign, tree)

    def product(self) -> Tree:
        factors, divisors = [self.power()], list[Tree]()
        while True:
            if self.peek() in ("*", "/") and self.kind() == "sign":
                into = factors if self.take() == "*" else divisors
                into.append(("neg", self.power()) if self.met("-") else self.power())
            elif self.begins_a_factor():
                self.beside(factors, divisors)
            elif len(factors) == 1 and not divisors:
                return factors[0]
            else:
                return ("mul", tuple(factors), tuple(divisors))

    def beside(self, factors: list[Tree], divisors: list[Tree]) -> None:
        """Take the factor that stands right beside the last one: both are a product, or a mixed number."""
        _, before, _ = self.tokens[self.place - 1]
        negative = factors[-1][0] == "neg"  # as in 2 * -3 1/2
        last = factors[-1][1] if negative else factors[-1]
        whole = before.isdigit() and last == ("number", Fraction(before)) and not divisors
        if self.kind() == "number":
            # "3 1/2" is a mixed number; "5 6", "x2" and ")2" are nothing
            top, bar, bottom = (self.peek(ahead) for ahead in range(3))
            if before == "!" or (before in (")", "}") and bar == "^"):
                factors.append(self.power())
                return
            if not (whole and bar == "/" and top.isdigit() and bottom.isdigit() and int(top) < int(bottom)):
                raise NotMathematics(top)
            self.place += 3
            mixed = self.postfix(("number", last[1] + Fraction(int(top), int(bottom))))
            factors[-1] = ("neg", mixed) if negative else mixed
            return
        right = self.power()
        part = right[1] if right[0] == "degrees" else right
        if before.isdigit() and part[0] == "div" and part[1][0] == part[2][0] == "number":
            if not (whole and part[1][1] < part[2][1]):
                raise NotMathematics("neither a mixed number nor a product")
            mixed = ("add", last, part) if part is right else ("degrees", ("add", last, part))
            factors[-1] = ("neg", mixed) if negative else mixed
        else:
            factors.append(right)

    def begins_a_factor(self) -> bool:
        token, openings = self.peek(), ("(", "[", "{", "\\frac", "\\binom", "\\lfloor", "\\lceil", "\\begin", "\\{")
        if token == "|":
            return self.bars == 0
        return self.kind() in ("number", "letter", "function") or token in openings or token in _ACCENTS

    def power(self) -> Tree:
        tree = self.postfix(self.atom())
        if self.met("^"):
            if self.peek() == "*":
                raise NotMathematics("a mark on a value")
            tree = self.postfix(("pow", tree, self.exponent()))
            if self.peek() == "^":
                raise NotMathematics("two exponents")
        return tree

    def exponent(self) -> Tree:
        if self.peek() == "{":
            return self.group("{", "}")
        negative = self.met("-")
        tree = self.postfix(self.atom())
        return ("neg", tree) if negative else tree

    def postfix(self, tree: Tree) -> Tree:
        while self.peek() in ("!", "°", "%") and self.kind() == "sign":
            mark = self.take()
            if mark == "!":
                tree = ("factorial", tree)
            elif mark == "°" and self.kind() == "number" and self.peek(1) == "'":  # and minutes
                tree = ("degrees", ("add", tree, ("div", self.number(), ("number", Fraction(60)))))
                self.place += 1
            elif mark == "°":
                tree = ("degrees", tree)
        return tree

    def group(self, opening: str, closing: str) -> Tree:
        """One tree in brackets, such as the argument of a command."""
        self.expect(opening)
        bars, self.bars = self.bars, 0
        tree = self.sum()
        self.bars = bars
        self.expect(closing)
        return tree

    def argument(self) -> Tree:
        r"""The argument of a command such as ``\frac``: a group, or one digit, letter or command."""
        if self.peek() == "{":
            return self.group("{", "}")
        if self.kind() == "number":
            _, token, _ = self.tokens[self.place]
            if not token.isdigit():
                raise NotMathematics(token)
            if len(token) > 1:  # LaTeX takes one digit, and leaves the others
                self.tokens[self.place] = ("number", token[1:], False)
            else:
                self.place += 1
            return ("number", Fraction(int(token[0])))
        if self.kind() == "letter":
            return ("symbol", self.take())
        raise NotMathematics(self.peek())

    def atom(self) -> Tree:
        token = self.peek()
        if reader := {"number": self.number, "letter": self.symbol, "function": self.function}.get(self.kind()):
            return reader()
        if token in ("(", "["):
            return self.brackets()
        if token == "{":
            return self.group("{", "}")
        if self.met("\\{"):
            if described := self.described():
                return described
            items = self.nested_items("\\}")
            self.expect("\\}")
            return ("set", *items)
        if self.met("|"):
            self.bars += 1
            tree = self.sum()
            self.bars -= 1
            self.expect("|")
            return ("call", "abs", tree)
        if token in ("\\lfloor", "\\lceil"):
            return ("call", token[2:] if token == "\\lfloor" else "ceil", self.group(token, token.replace("l", "r", 1)))
        if self.met("\\frac", "\\binom"):
            top, bottom = self.argument(), self.argument()
            return ("div", top, bottom) if token == "\\frac" else ("call", "binomial", top, bottom)
        if token == "\\begin":
            return self.matrix()
        if token in _ACCENTS:
            return self.accented()
        raise NotMathematics(token)

    def number(self) -> Tree:
        token = self.take()
        if self.peek() == "\\overline" and "." in token and self.peek(1) == "{" and self.peek(2).isdigit():
            return self.repeating(token)
        place = self.place
        if self.met("_"):
            base = self.take() if self.peek() != "{" else self.peek(1) + self.peek(2).replace("}", "")
            if self.tokens[self.place - 1][1] == "_":
                self.place += 3
            tree = based(f"{token}_{{{base}}}")
            if tree is None or self.tokens[place][2]:
                raise NotMathematics("no base")
            return tree if tree[0] == "number" else ("number", Fraction(int(tree[1], tree[2])))
        return ("number", Fraction(token))

    def repeating(self, token: str) -> Tree:
        r"""A decimal of which the digits under a line repeat, such as ``0.1\overline{6}``."""
        digits = self.peek(2)
        self.place += 3
        self.expect("}")
        places = len(token.partition(".")[2])
        return ("number", Fraction(token) + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places))

    def symbol(self) -> Tree:
        name = self.take() + self.marks()
        alone = self.kind(1) in ("number", "letter") and self.peek(2) == ")"
        if self.peek() == "(" and (name.rstrip("'") == "f" or alone):
            return ("symbol", name + self.applied())  # neither I(0) nor x(t) is a product
        if name == "f" and [self.peek(n) for n in range(6)] == ["^", "{", "-", "1", "}", "("]:
            self.place += 5
            return ("symbol", "f⁻¹" + self.applied())
        return ("symbol", name)

    def marks(self) -> str:
        """The primes and the index that belong to a name."""
        marks = ""
        while self.peek() == "'" or ("_" not in marks and self.peek() == "_"):
            marks += self.take()
            marks += self.raw() if marks.endswith("_") else ""
        return marks

    def raw(self) -> str:
        """The tokens of an index or of an accent's letter, as a name."""
        if self.met("{"):
            return self.closed("{", "}")
        token = self.take()
        if token in ("}", ")", "]", ",", "^", "_", "=", "(", "+", "-", "*", "/"):
            raise NotMathematics(token)
        return token

    def closed(self, opening: str, closing: str) -> str:
        """The tokens before the bracket that closes the one that was taken."""
        tokens, depth = list[str](), 1
        while depth:
            tokens.append(self.take())
            depth += (tokens[-1] == opening) - (tokens[-1] == closing)
        return "".join(tokens[:-1])

    def applied(self) -> str:
        """What a function without a known meaning is applied to, as a part of its name."""
        self.expect("(")
        return f"({self.closed('(', ')')})"

    def accented(self) -> Tree:
        accent = self.take()
        if accent in ("\\angle", "\\triangle", "\\measuredangle"):
            name = ""
            while self.kind() == "letter":
                name += self.take() + self.marks()
        else:
            name = self.raw()
        if not name:
            raise NotMathematics(accent)
        return ("symbol", f"{accent}{{{name}}}" + self.marks())

    def function(self) -> Tree:
        name = self.take()
        if name == "sqrt":
            return self.root()
        self.deeper()
        index, power = None, None
        for _ in range(2):
            if name == "log" and index is None and self.met("_"):
                # nobody means a base of 1 by \log_10
                index = ("number", Fraction(self.take())) if self.kind() == "number" else self.argument()
            elif power is None and self.met("^"):
                power = self.exponent()
        inside = self.arguments(name)
        if name not in ("gcd", "lcm", "max", "min") and len(inside) != 1:
            raise NotMathematics(name)
        logarithm = ("call", "log", *inside, index or ("number", Fraction(10)))
        tree = logarithm if name in ("log", "lg") else ("call", name, *inside)
        self.depth -= 1
        if power is None:
            return tree
        if power == ("neg", ("number", Fraction(1))) and name in _INVERTIBLE:
            return ("call", "arc" + name, *tree[2:])
        return ("pow", tree, power)

    def arguments(self, name: str) -> list[Tree]:
        """What a function is applied to: what stands in brackets, or the factors up to a sign or another function."""
        if self.peek() in ("(", "[", "{"):
            closing = {"(": ")", "[": "]", "{": "}"}[self.take()]
            items = self.nested_items(closing)
            self.expect(closing)
            return items
        negative = self.met("-")
        factors = [self.power()]
        while self.begins_a_factor() and self.kind() != "function" and self.peek() != "|":
            self.beside(factors, [])
        tree = factors[0] if len(factors) == 1 else ("mul", tuple(factors), ())
        return [("neg", tree) if negative else tree]

    def nested_items(self, closing: str) -> list[Tree]:
        bars, self.bars = self.bars, 0
        self.deeper()
        items = self.items(closing)
        self.bars = bars
        self.depth -= 1
        return items

    def root(self) -> Tree:
        degree: Tree = ("number", Fraction(2))
        if self.met("["):
            degree = self.sum()
            self.expect("]")
        inside = self.group("(", ")") if self.peek() == "(" else self.argument()
        return ("call", "root", inside, degree)

    def brackets(self) -> Tree:
        opening = self.take()
        items = self.nested_items(")" if self.peek() != "]" else "]")
        closing = self.take()
        if closing not in (")", "]") or not items:
            raise NotMathematics(closing)
        if len(items) == 1:
            if (opening, closing) not in (("(", ")"), ("[", "]")):
                raise NotMathematics("brackets that do not match")
            return ("matrix", "matrix", *items[0][2:]) if items[0][:2] == ("matrix", "rows") else items[0]
        return ("tuple", opening + closing, *items)

    def matrix(self) -> Tree:
        self.expect("\\begin")
        self.expect("{")
        name = self.take()
        self.expect("}")
        if name not in _MATRICES:
            raise NotMathematics(name)
        rows: list[list[Tree]] = [[]]
        bars, self.bars = self.bars, 0
        while self.peek() != "\\end":
            rows[-1] += self.relation()
            self.place += self.peek() == "," and self.peek(1) == "\\\\"
            if self.met("\\\\"):
                rows += [[]] if self.peek() != "\\end" else []
            elif not self.met("&") and self.peek() != "\\end":
                raise NotMathematics(self.peek())
        self.bars = bars
        for token in ("\\end", "{", name, "}"):
            self.expect(token)
        if len({len(row) for row in rows}) != 1 or (_MATRICES[name] == "list" and len(rows[0]) > 1):
            raise NotMathematics("rows of several lengths")
        if _MATRICES[name] == "list":
            return rows[0][0] if len(rows) == 1 else ("list", *(row[0] for row in rows))
        return ("matrix", _MATRICES[name], *map(tuple, rows))


def _without_commas(text: str) -> str:
    """``text`` without the commas between thousands, but for what stands in brackets."""
    parts, place, depth = [], 0, 0
    for match in _THOUSANDS.finditer(text):
        before = text[place : match.start()]
        depth += sum((sign in "([") - (sign in ")]") for sign in before) + before.count("\\{") - before.count("\\}")
        parts += [before, match[0] if depth > 0 else match[0].replace(",", "")]
        place = match.end()
    return "".join([*parts, text[place:]])


def _with_signs(tree: Any, sign: int) -> Any:
    """``tree`` with one of the signs that each ± or ∓ stands for."""
    if not isinstance(tree, tuple):
        return tree
    if tree and tree[0] in ("±", "∓"):
        inner = _with_signs(tree[1], sign)
        return inner if (tree[0] == "±") == (sign > 0) else ("neg", inner)
    return tuple(_with_signs(part, sign) for part in tree)
