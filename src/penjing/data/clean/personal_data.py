"""Mask personal data: addresses of mail and computers, numbers of phones, cards and identities, keys of services.

A number counts only in the form, and with the check digit, of its kind.
"""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penjing.data.clean.rule import RuleSettings, TextRule
from penjing.data.clean.text_scan import Flag, scan

Kind = Literal["mail", "key", "identity", "card", "ip", "phone"]


@dataclass(frozen=True, kw_only=True)
class PersonalDataSettings(RuleSettings):
    mask: tuple[Kind, ...] = ("mail", "key", "identity", "card", "ip", "phone")


class PersonalData(TextRule):
    """Each datum becomes its kind in brackets, such as [MAIL]."""

    settings_type = PersonalDataSettings
    settings: PersonalDataSettings

    def text(self, text: str) -> str:
        flags = scan(text).flags
        for kind, (flag, pattern, is_valid) in _KINDS.items():
            if flags & flag and kind in self.settings.mask and (kind != "key" or _may_hold_key(text)):
                text = _masked(text, pattern, is_valid, f"[{kind.upper()}]")
        return text


def _may_hold_key(text: str) -> bool:
    """A test that is a tenth of the pattern's work."""
    text = text.lower()
    return any(hint in text for hint in _KEY_HINTS.split())


def _masked(text: str, pattern: re.Pattern[str], is_valid: Callable[[re.Match[str]], bool], mask: str) -> str:
    parts, end = list[str](), 0
    for found in pattern.finditer(text.translate(_NARROW) if _WIDE.search(text) else text):
        if is_valid(found):
            begin = found.end("keep") if found.re.groups and found["keep"] else found.start()
            parts += [text[end:begin], mask]
            end = found.end()
    return "".join([*parts, text[end:]]) if parts else text


_WIDE = re.compile("[\uff10-\uff19]")
_NARROW = {0xFF10 + digit: str(digit) for digit in range(10)}  # full-width digits


def _digits(found: re.Match[str]) -> list[int]:
    return [int(char) for char in found[0] if char.isdecimal()]


def _is_identity(found: re.Match[str]) -> bool:
    """Of a Chinese resident: 17 digits and their check digit (ISO 7064, MOD 11-2)."""
    if len(found[0]) != 18:  # of the United States, which has none
        return True
    digits = _digits(found)[:17]
    weights = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
    last = found[0][-1].upper()
    return "10X98765432"[sum(map(int.__mul__, digits, weights)) % 11] == (last if last == "X" else str(int(last)))


def _is_card(found: re.Match[str]) -> bool:
    """By Luhn's check digit."""
    digits = _digits(found)[::-1]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return len(set(digits)) > 1 and (sum(digits[::2]) + sum(doubled)) % 10 == 0


def _is_ip(found: re.Match[str]) -> bool:
    try:
        address = ipaddress.ip_address(found[0])
    except ValueError:
        return False
    if address.version == 4:
        return not address.is_private  # a router's is no person's
    groups = found[0].split(":")  # `1::2` is a slice
    return any(map(str.isdigit, found[0])) and (max(map(len, groups)) > 2 or len(groups) > 5)


_NAME = r"[A-Za-z0-9\u00c0-\u024f._%+-]"
_KEY_HINTS = (
    "key secret token passw sk- sk_ pk- pk_ rk- rk_ akia asia ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- hf_ xox aiza "
    "npm_ pypi- ltai akid eyj"
)
_CARDS = (
    r"(?:4\d{3}|5[1-5]\d\d|2[2-7]\d\d|35\d\d|6\d{3})(?:[ -]?\d{4}){3}|3[47]\d\d[ -]?\d{6}[ -]?\d{5}"
    r"|3[068]\d\d[ -]?\d{6}[ -]?\d{4}"
    r"|6\d{3}(?:[ -]?\d{4}){3}[ -]?\d{1,3}"
)
_ALONE = r"(?<![A-Za-z0-9_+*/=$.,-])"  # not a part of a sum, a decimal, or a code
_PHONES = (  # with the country's code, Chinese mobiles, Chinese landlines, free numbers, North America, named, others
    rf"{_ALONE}(?:\+|00)[1-9]\d{{0,2}}[ .-]?(?:\(\d{{1,4}}\)[ .-]?)?\d{{1,4}}(?:[ .-]?\d{{2,4}}){{1,4}}",
    r"(?<![\d.])(?:86[ -]?)?1[3-9]\d[ -]?\d{4}[ -]?\d{4}",
    r"(?:\(0[1-9]\d{1,2}\)[ -]?|(?<![\d.-])0[1-9]\d{1,2}(?:[ -]|(?=[2-9]\d{7})))[2-9]\d{2,3}[ -]?\d{4}",
    rf"{_ALONE}[48]00[ -]\d{{3}}[ -]?\d{{4}}",
    rf"{_ALONE}(?:1[ .-])?(?:\([2-9]\d\d\)[ .-]?|\d{{3}}[ .-])\d{{3}}[ .-]\d{{4}}",
    r"(?P<keep>(?i:\b(?:phone|tel|mobile|cell|fax|whatsapp)|电话|手机|热线|传真)[^\d\n+]{0,8})\+?\d{7,15}",
    rf"{_ALONE}0[1-9]\d{{1,3}}[ /-]\d{{3,4}}[ -]?\d{{3,4}}",
)
_KINDS: dict[Kind, tuple[int, re.Pattern[str], Callable[[re.Match[str]], bool]]] = {
    "mail": (
        Flag.MAIL,
        re.compile(
            rf"(?<!{_NAME}){_NAME}{{1,64}}[@\uff20](?:[A-Za-z0-9\u00c0-\u024f-]{{1,63}}\.){{1,8}}[A-Za-z]{{2,24}}"
        ),
        lambda found: True,
    ),
    "key": (
        Flag.KEY,
        re.compile(
            r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[\s\S]{1,8000}?-----END [A-Z ]{0,40}PRIVATE KEY-----"
            r"|(?<![A-Za-z0-9])(?:(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,}"
            r"|github_pat_[A-Za-z0-9_]{30,}|glpat-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{30,}|xox[abeprs]-[A-Za-z0-9-]{10,}"
            r"|AIza[A-Za-z0-9_-]{35}|npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{30,}|LTAI[A-Za-z0-9]{12,}|AKID[A-Za-z0-9]{30,}"
            r"|eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,})"
            r"|(?P<keep>(?i:key|secret|token|password|passwd)['\"]?[ ]{0,2}[:=][ ]{0,2}"
            r"(?:(?P<quote>['\"])|(?i:bearer ))?)"
            r"(?=[^\s'\"]*\d)(?(quote)[^\s'\"]{12,}(?=['\"])|[A-Za-z0-9/+=-]{16,}(?![A-Za-z0-9_.(\[]))"
        ),
        lambda found: True,
    ),
    "identity": (
        Flag.NUMBER,
        re.compile(
            r"(?<![0-9A-Za-z])[1-9]\d{5}(?:18|19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}[\dXx](?![0-9A-Za-z])"
            r"|(?<![\d-])(?!000|666|9)\d{3}-(?!00)\d\d-(?!0000)\d{4}(?![\d-])"
        ),
        _is_identity,
    ),
    "card": (Flag.NUMBER, re.compile(rf"(?<![\d.])(?:{_CARDS})(?!\d)"), _is_card),
    "ip": (
        Flag.NUMBER | Flag.IPV6,
        re.compile(
            r"(?<![A-Za-z0-9_.:])(?:(?:\d{1,3}\.){3}\d{1,3}(?!\.?\d)|[0-9A-Fa-f:]*::?[0-9A-Fa-f:]+)(?![A-Za-z0-9_])"
        ),
        _is_ip,
    ),
    "phone": (
        Flag.NUMBER,
        re.compile(rf"(?=[+(\dptmcfwPTMCFW电手热传])(?:{'|'.join(_PHONES)})(?![\d=]|-\d)"),  # by its first character
        lambda found: 7 <= len(_digits(found)) <= 15,
    ),
}
