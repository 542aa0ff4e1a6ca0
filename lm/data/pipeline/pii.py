"""Personal data -> placeholders: e-mail addresses, phone numbers, IP addresses, cards, IBANs, national ids.

A pattern finds candidates; where the number has a check digit, only numbers that pass stay found (python-stdnum).
What has no check digit is taken in its usual writing only, so that dates, versions and prices stay.
"""

from __future__ import annotations

import importlib
import ipaddress
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from lm.data.pipeline.stage import DocumentRule, Kept, Outcome, PerDocument, StageKind, list_option
from lm.data.pipeline.store import Item


@dataclass(frozen=True)
class Rule:
    """One kind of personal data.

    Attributes:
        pattern: finds candidates.
        check: decides on a candidate; may be slow.
        hint: characters of which one is in any candidate: a text without them is not searched.
    """

    pattern: re.Pattern[str]
    check: Callable[[str], bool] = lambda found: True
    hint: str = ""


def _public(found: str) -> bool:
    """Addresses of private and reserved ranges name nobody; versions like 1.2.3.4 look the same, and do go."""
    try:
        return ipaddress.ip_address(found).is_global
    except ValueError:
        return False


@cache
def _stdnum(module: str) -> Any:
    return importlib.import_module(f"stdnum.{module}")


def _valid(*modules: str) -> Callable[[str], bool]:
    return lambda found: any(_stdnum(module).is_valid(found) for module in modules)


def _card(found: str) -> bool:
    """Luhn's check digit, a length and a first digit that card issuers use (ISO/IEC 7812)."""
    digits = re.sub(r"[ -]", "", found)
    return 13 <= len(digits) <= 19 and len(set(digits)) > 1 and bool(_stdnum("luhn").is_valid(digits))


def _iban(found: str) -> bool:
    return bool(_stdnum("iban").is_valid(found, check_country=False))


def _phone(found: str) -> bool:
    return 8 <= sum(character.isdigit() for character in found) <= 15


_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_START, _END = r"(?<![\w.+/-])", r"(?![\w-]|\.\w)"  # not within a path, a version or a longer number
_HEX = r"[0-9A-Fa-f]{1,4}"

# In this order: a number that two rules match is the earlier's.
RULES: dict[str, Rule] = {
    "email": Rule(
        re.compile(r"(?<![\w.+-])[A-Za-z0-9][\w.+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b"), hint="@"
    ),
    "iban": Rule(re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"), _iban),
    "card": Rule(re.compile(rf"{_START}[2-6]\d{{3}}(?:[ -]?\d{{4}}){{2}}[ -]?\d{{1,7}}{_END}"
                            rf"|{_START}3[47]\d{{2}}[ -]?\d{{6}}[ -]?\d{{5}}{_END}"), _card),
    "national_id": Rule(
        re.compile(
            rf"{_START}(?:\d{{3}}\.\d{{3}}\.\d{{3}}-\d{{2}}"  # Brazil: CPF
            r"|\d{6}[-+ABCDEFUVWXY]\d{3}[0-9A-Z]"  # Finland: henkilötunnus
            r"|[XYZ]?\d{7,8}[A-Z]"  # Spain: DNI, NIE
            r"|[A-Z]{6}\d{2}[A-Z]\d{2}[A-Z]\d{3}[A-Z]"  # Italy: codice fiscale
            r"|[12] ?\d{2} ?\d{2} ?\d[\dAB] ?\d{3} ?\d{3} ?\d{2}"  # France: NIR
            r"|\d{17}[\dX]"  # China: resident identity number
            r"|[2-9]\d{3} \d{4} \d{4}"  # India: Aadhaar, as printed
            r"|\d{2} ?\d{3} ?\d{3} ?\d{3}"  # Germany: tax id; Poland: PESEL
            rf"|\d{{6}}-\d{{4}}|\d{{3}}-\d{{2}}-\d{{4}}){_END}"  # Sweden: personnummer; USA: social security number
        ),
        _valid("br.cpf", "fi.hetu", "es.dni", "es.nie", "it.codicefiscale", "fr.nir", "cn.ric", "in_.aadhaar",
               "de.idnr", "pl.pesel", "se.personnummer", "us.ssn"),
    ),
    "ip": Rule(
        re.compile(rf"{_START}{_OCTET}(?:\.{_OCTET}){{3}}{_END}"
                   rf"|(?<![\w:.])(?:{_HEX}:){{2,7}}(?::?{_HEX}(?::{_HEX}){{0,5}})?:?(?![\w:])"), _public, hint=".:"
    ),
    "phone": Rule(
        re.compile(rf"(?<![\w.+-])\+\d(?:[ ./()-]{{0,2}}\d){{7,14}}{_END}"
                   rf"|{_START}(?:1[ .-])?(?:\([2-9]\d{{2}}\) ?|[2-9]\d{{2}}[.-])[2-9]\d{{2}}[.-]\d{{4}}{_END}"), _phone
    ),
}  # fmt: skip

PLACEHOLDERS = {kind: f"<{kind.upper()}>" for kind in RULES}

_DIGIT = re.compile(r"\d")


def scrub(text: str, kinds: list[str]) -> tuple[str, Counter[str]]:
    """The text with placeholders, and how many of each kind were found."""
    counts: Counter[str] = Counter()
    has_digit = _DIGIT.search(text) is not None
    for kind in RULES:
        rule = RULES[kind]
        searched = any(character in text for character in rule.hint) if rule.hint else has_digit
        if kind not in kinds or not searched:
            continue

        def replace(match: re.Match[str], kind: str = kind, rule: Rule = rule) -> str:
            if not rule.check(match.group()):
                return match.group()
            counts[kind] += 1
            return PLACEHOLDERS[kind]

        text = rule.pattern.sub(replace, text)
    return text, counts


def pii(options: dict[str, Any]) -> DocumentRule:
    """Replace personal data; no document goes."""
    kinds = list_option("pii", options, "kinds")

    def rule(item: Item) -> Outcome:
        text, counts = scrub(item.string, kinds)
        if not counts:
            return Kept()
        place = text.find(PLACEHOLDERS[next(iter(counts))])
        return Kept(text.encode(), counts, " ".join(text[max(0, place - 60) : place + 60].split()))

    return rule


KINDS = {
    "pii": StageKind(
        PerDocument(pii),
        {"kinds": list(RULES)},
        {"kinds": tuple(RULES)},
        changes=True,
        packages=("python-stdnum",),
    )
}
