"""Remove lines of web pages that belong to no text, and leave out documents that are lists of links.

C4's rule of terminal punctuation for each line (arXiv:1910.10683) is not here: it costs 30 % of English tokens, and
harms other languages (arXiv:2506.20920).
"""

import re
from dataclasses import dataclass, replace

from penjing.base.config import Fraction, NonNegativeInt
from penjing.data.clean.quality import DocumentRule, by_language, is_chinese
from penjing.data.clean.rule import Dropped, Record, RuleSettings
from penjing.data.clean.text_scan import Flag, Scan, scan
from penjing.data.formats.schema import Document

# Lines in lower case.
_SENTENCE = re.compile(
    r"""
    (?:please\ )?(?:enable|turn\ on|activate)\ (?:javascript|cookies)\b.*
    |.{0,60}\b(?:javascript|cookies)\ (?:is|are|must\ be|needs?\ to\ be)\ (?:disabled|enabled|required|turned\ on)\b.*
    |.{0,40}\b(?:we|(?:this|our)\ (?:web)?site)\ uses?\ cookies\b.*
    |(?:©|\(c\)\ |copyright\b).*|[^#/*;]*\ball\ rights\ reserved\.?
    |(?:subscribe|sign\ up)\ (?:to|for)\ (?:our|the)\ .{0,40}\bnewsletter\b.*
    |(?:share|follow\ us)\ on\ (?:facebook|twitter|instagram|linkedin|pinterest)\b.*
    |click\ here\ to\ .*|lorem\ ipsum\b.*
    |(?:上一篇|下一篇|上一页|下一页|分享到|责任编辑|本文来源|版权所有)\s*[:：|©].*|.*(?:icp备|icp证|公网安备).*
    |.{0,20}(?:扫描二维码|扫码关注|关注(?:我们的?)?微信公众号|点击(?:这里|此处|查看更多|下载)).*
    |(?:本站|本网站|我们)使用\ ?cookies?.*|请(?:开启|启用)\ ?(?:javascript|cookies?).*
    """,
    re.VERBOSE,
)
# A line of such phrases: one that is found nowhere else, or two that are.
_WEB_PHRASES = (
    "terms of use|terms of service|terms and conditions|privacy policy|cookie policy|cookie settings"
    "|all rights reserved|sitemap|contact us|about us|log in|login|sign in|sign up|subscribe|advertisement"
    "|share this|read more|click here|load more|see more|back to top|skip to main content|skip to content"
    "|follow us|related posts|related articles|related stories|leave a reply|leave a comment"
    "|accept all cookies|accept cookies|manage cookies|reject all"
    "|首页|登录|登陆|关于我们|联系我们|网站地图|返回顶部|返回首页|上一篇|下一篇|上一页"
    "|下一页|查看更多|点击查看更多|阅读全文|阅读原文|展开全文|加载更多|相关阅读|相关推荐"
    "|相关文章|热门推荐|猜你喜欢|分享到|发表评论|免责声明|隐私政策|用户协议|服务条款"
    "|友情链接|版权所有|加入收藏|设为首页|会员中心"
)
_PLAIN_PHRASES = (
    "home|register|sponsored|tweet|share|print|email|next|previous|menu|search|help|faq|newsletter|comments?"
    "|contact|about|careers|blog|news|products|services|support|downloads?|facebook|twitter|instagram|youtube"
    "|linkedin|pinterest|more"
    "|注册|主页|联系方式|更多|分享|收藏|打印|评论|点赞|举报|广告|搜索|扫一扫|微信|微博"
    "|新闻|下载|帮助|购物车|客服|产品|服务"
)
_PHRASE = re.compile(rf"(?<![a-z])(?:(?P<web>{_WEB_PHRASES})|{_PLAIN_PHRASES})(?![a-z])")
_LONGEST = 200  # characters of a line that can be boilerplate


@dataclass(frozen=True, kw_only=True)
class Limits(RuleSettings):
    """A document is a list of links if it has so many lines, less of two shares, and more of the third."""

    min_lines: NonNegativeInt = 8
    closed_lines: Fraction = 0.12  # share of lines that end in punctuation
    function_words: Fraction = 0.02  # share of words such as "the"
    capital_words: Fraction = 0.5  # share of words that begin with a capital letter


class Lines(DocumentRule):
    # segment_chars: mean between spaces; a line of a poem has four and more
    settings_type = by_language(
        Limits, min_lines=12, closed_lines=0.106, function_words=0.01, capital_words=0.0, segment_chars=4.0
    )

    def __call__(self, record: Record) -> Record | str:
        if not isinstance(record, Document):
            return record
        counts = scan(record.text)
        if counts.flags & Flag.BOILERPLATE:
            kept = [line for line in record.text.split("\n") if not _is_boilerplate(line)]
            text = "\n".join(kept).strip("\n")
            if not text.strip():
                return Dropped("no line of text")
            if len(text) < len(record.text.strip("\n")):
                record = replace(record, text=text)
        return self.judge(record.text, scan(record.text)) or record

    def judge(self, text: str, counts: Scan) -> Dropped | None:
        """Why the document is a list of links. A list of single words, such as names, is none."""
        limits = self.limits(counts)
        if (
            counts.lines < limits.min_lines
            or counts.words < 1.3 * counts.lines
            or counts.capital_words < limits.capital_words * counts.words
            or (is_chinese(counts) and counts.words >= limits.segment_chars * (counts.spaces + 1))
        ):
            return None
        closed, words = counts.closed_lines / counts.lines, counts.stop_words / counts.words
        if closed >= limits.closed_lines or words >= limits.function_words:
            return None
        return Dropped("a list, not a text", f"{closed:.2f} of lines with punctuation, {words:.3f} function words")


def _is_boilerplate(line: str) -> bool:
    line = line.strip().lower()
    if not 0 < len(line) <= _LONGEST:
        return False
    if _SENTENCE.fullmatch(line):
        return True
    phrases = list(_PHRASE.finditer(line))
    is_web = any(found["web"] for found in phrases) or len({found[0] for found in phrases}) > 1
    return is_web and not any(map(str.isalpha, _PHRASE.sub("", line)))
