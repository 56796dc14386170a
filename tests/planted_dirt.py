"""Dirt of every kind that the shipped pipeline removes, planted into a clean text; and personal data."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable

BOILERPLATE = {
    "en": [
        "Home | About Us | Contact | Login",
        "We use cookies to improve your experience on our site.",
        "All rights reserved.",
        "Share on Facebook",
        "Click here to subscribe to our newsletter",
        "Copyright © 2024 Example Inc.",
        "Skip to main content",
        "Please enable JavaScript to view this page.",
        "Read more »",
        "Privacy Policy | Terms of Use | Sitemap",
    ],
    "zh": [
        "首页 | 新闻 | 关于我们 | 联系我们 | 登录",
        "版权所有 © 2024 某某公司",
        "上一篇：春天的故事",
        "京ICP备12345678号-1",
        "分享到：微信 微博",
        "扫描二维码关注微信公众号",
        "责任编辑：张三",
        "点击查看更多",
        "相关阅读",
        "免责声明 | 隐私政策 | 友情链接",
    ],
}
FOREIGN = {
    "fr": "Le lendemain matin, la petite fille ouvrit la fenêtre et vit "
    "que toute la vallée était couverte de neige. Elle appela "
    "son frère, qui dormait encore, et ils descendirent ensemble dans le jardin pour y construire une maison.",
    "de": "Am nächsten Morgen öffnete das kleine Mädchen das Fenster und "
    "sah, dass das ganze Tal mit Schnee bedeckt war. Es rief "
    "seinen Bruder, der noch schlief, und sie gingen zusammen in den Garten, um dort ein Haus zu bauen.",
    "es": "A la mañana siguiente, la niña abrió la ventana y vio que todo "
    "el valle estaba cubierto de nieve. Llamó a su hermano, "
    "que todavía dormía, y bajaron juntos al jardín para construir allí una casa pequeña.",
    "ru": "На следующее утро девочка открыла окно и увидела, что вся долина "
    "покрыта снегом. Она позвала брата, который ещё спал, "
    "и они вместе спустились в сад, чтобы построить там дом.",
    "ja": "次の朝、女の子が窓を開けると、谷じゅうが雪でおおわれていました。女の子はまだ寝ている弟を呼んで、"
    "いっしょに庭へ下りて、そこに家を作りました。",
    "ko": "다음 날 아침, 소녀가 창문을 열자 온 골짜기가 눈으로 덮여 있었습니다. "
    "소녀는 아직 자고 있던 동생을 불러 함께 정원으로 내려가 집을 지었습니다.",
    "ar": "في صباح اليوم التالي فتحت الفتاة الصغيرة النافذة ورأت أن الوادي كله مغطى "
    "بالثلج، فنادت أخاها الذي كان لا يزال نائما ونزلا معا إلى الحديقة.",
}
MENU = {
    "en": [
        "Home",
        "News",
        "Sports",
        "Weather",
        "Business",
        "Travel",
        "Shop",
        "Login",
        "Register",
        "Help",
        "Cart",
        "Brands",
    ],
    "zh": [
        "首页",
        "新闻",
        "体育",
        "财经",
        "娱乐",
        "汽车",
        "房产",
        "科技",
        "教育",
        "旅游",
        "健康",
        "视频",
        "客服",
        "注册",
    ],
}


def mojibake(text: str, rng: random.Random) -> str:
    encoding = rng.choice(["latin-1", "cp1251" if text.isascii() else "latin-1", "mac-roman"])
    return text.encode().decode(encoding, "replace")


def gbk(text: str, rng: random.Random) -> str:
    return text.encode("gbk", "ignore").decode("latin-1")


def invisible(text: str, rng: random.Random) -> str:
    places = sorted(rng.sample(range(len(text)), min(5, len(text))), reverse=True)
    for place in places:
        text = text[:place] + rng.choice("\0\x07\x1b\u200b\u2060\ufeff\xad\x7f") + text[place:]
    return text


# What is repaired: the clean text comes back.
REPAIRED: dict[str, Callable[[str, random.Random], str]] = {
    "mojibake": mojibake,
    "invisible": invisible,
    "line ends": lambda text, rng: text.replace("\n", rng.choice(["\r\n", "\r", "\u2028"])),
}


def boilerplate(text: str, rng: random.Random, language: str) -> str:
    lines = BOILERPLATE[language]
    return "\n".join([*rng.sample(lines, 2), text, *rng.sample(lines, 3)])


def numbers(rng: random.Random) -> str:
    return "\n".join(" ".join(str(rng.randint(0, 10**6)) for _ in range(8)) for _ in range(20))


def symbols(rng: random.Random) -> str:
    return "".join(rng.choice("★☆◆◇♥!!!####@@@$$%%^&*()_+=<>[]{}|~~a1") for _ in range(400))


def blob(rng: random.Random) -> str:
    return base64.b64encode(rng.randbytes(3000)).decode()


def menu(rng: random.Random, language: str) -> str:
    return "\n".join(" ".join(rng.sample(MENU[language], rng.randint(2, 4))) for _ in range(40))


def repeated(text: str, rng: random.Random) -> str:
    begin = rng.randrange(max(1, len(text) - 80))
    return (text[begin : begin + rng.randint(30, 80)] + " ") * rng.randint(8, 40)


def dropped(text: str, rng: random.Random, language: str) -> dict[str, str]:
    """Texts that are nothing but dirt, by kind."""
    return {
        "short": rng.choice(["", "ok", "1", "...", "!!!", "Login", "|", "好"]),
        "repetition": repeated(text, rng),
        "symbols": symbols(rng),
        "numbers": numbers(rng),
        "base64": blob(rng),
        "menu": menu(rng, language),
        "language": rng.choice(list(FOREIGN.values())),
        "letters": " ".join(text[:300].replace(" ", "")) if language == "en" else numbers(rng),
        "broken": text[:400].encode("gbk", "ignore").decode("utf-8", "replace")
        if language == "zh"
        else "\ufffd\ufffd" * 30 + text[:200],
        "characters": "".join(rng.choice("ab") + "=" * rng.randint(20, 60) for _ in range(20)),
    }


# --- personal data ---------------------------------------------------------------------------------------------------


def identity(rng: random.Random) -> str:
    digits = f"{rng.choice(['110105', '440308', '310101', '510104'])}{rng.randint(1950, 2012)}{rng.randint(1, 12):02}"
    digits += f"{rng.randint(1, 28):02}{rng.randint(0, 999):03}"
    weights = [2 ** (17 - place) % 11 for place in range(17)]
    return digits + "10X98765432"[sum(int(d) * w for d, w in zip(digits, weights, strict=True)) % 11]


def card(rng: random.Random) -> str:
    digits = [int(char) for char in rng.choice(["4", "51", "55", "62", "37", "6011"])]
    size = 15 if digits[0] == 3 else rng.choice([16, 19]) if digits == [6, 2] else 16
    digits += [rng.randint(0, 9) for _ in range(size - 1 - len(digits))]
    total = sum(d if place % 2 else sum(divmod(2 * d, 10)) for place, d in enumerate(reversed(digits)))
    text = "".join(map(str, [*digits, -total % 10]))
    separator = rng.choice(["", " ", "-"])
    return separator.join(text[at : at + 4] for at in range(0, 16, 4)) if size == 16 else text


def phone(rng: random.Random) -> str:
    def drawn(number: int) -> str:
        return "".join(str(rng.randint(0, 9)) for _ in range(number))

    mobile = f"1{rng.randint(3, 9)}{drawn(9)}"
    area = rng.choice(["202", "415", "646"])
    return rng.choice(
        [
            mobile,
            f"{mobile[:3]}-{mobile[3:7]}-{mobile[7:]}",
            f"+86 {mobile}",
            f"010-6{drawn(7)}",
            f"0755-8{drawn(7)}",
            f"({area}) 555-{drawn(4)}",
            f"{area}-555-{drawn(4)}",
            f"+1 {area} 555 {drawn(4)}",
            f"+44 20 7946 {drawn(4)}",
        ]
    )


def key(rng: random.Random) -> str:
    def drawn(number: int, letters: str = "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz0123456789") -> str:
        return "".join(rng.choice(letters) for _ in range(number))

    return rng.choice(
        [
            f"sk-{drawn(48)}",
            f"ghp_{drawn(36)}",
            f"AKIA{drawn(16, 'ABCDEFGHIJKLMNOPQRSTUVWXYZ234567')}",
            f"AIza{drawn(35)}",
            f"hf_{drawn(34)}",
            f"xoxb-{drawn(11, '0123456789')}-{drawn(24)}",
        ]
    )


PERSONAL: dict[str, Callable[[random.Random], str]] = {
    "mail": lambda rng: (
        rng.choice(["li.wei", "anna+news", "j_smith99", "x"]) + "@" + rng.choice(["163.com", "mail.example.co.uk"])
    ),
    "phone": phone,
    "identity": identity,
    "card": card,
    "ip": lambda rng: rng.choice(
        [
            f"{rng.randint(11, 126)}.{rng.randint(0, 255)}.{rng.randint(0, 255)}.{rng.randint(1, 254)}",
            f"2001:db8::{rng.randint(1, 9999):x}:{rng.randint(1, 9999):x}",
        ]
    ),
    "key": key,
}
SENTENCES = {
    "en": ["Contact me at {} tomorrow.", "My number ({}) has changed.", "Value: {}", "it is {}, she said."],
    "zh": ["请联系{}，谢谢。", "我的号码是{}。", "（{}）", "信息：{}；请查收"],
}
