"""Chinese: how events, reasons, questions and requests of the toy world are worded.

The same keys and roles as in `english`. `{p.zh}` is the whole phrase “在花园里”; `{a.ta}` is 他, 她 or 它.
"""

from __future__ import annotations

REFUSAL = "故事里没有说。"
BECAUSE = "因为{why}"

EVENTS: dict[str, tuple[str, ...]] = {
    "stay": ("{a.zh}{p.zh}玩。", "{a.zh}{p.zh}休息。"),
    "own": ("{a.zh}有{d.zh}。", "{a.zh}身边有{d.zh}。"),
    "with": ("{a.zh}带着{d.zh}{p.zh}玩。", "{a.zh}{p.zh}玩，带着{d.zh}。"),
    "meet": ("{a.zh}{p.zh}遇到了{b.zh}。", "后来，{a.zh}{p.zh}见到了{b.zh}。"),
    "see": ("{a.zh}{p.zh}看见了{b.zh_one}。", "后来，{a.zh}{p.zh}遇到了{b.zh_one}。"),
    "lose": ("后来，{a.zh}把{t.zh}弄丢了。", "可是，{a.zh}找不到{t.zh}了。"),
    "blow": ("忽然，风把{t.zh}吹走了。", "可是，一阵大风吹走了{t.zh}。"),
    "take": ("忽然，{b.zh_one}拿走了{t.zh}。", "可是，{b.zh_one}把{t.zh}拿走了。"),
    "search": ("{a.zh}和{b.zh}一起找{t.zh}。", "{b.zh}帮{a.zh}找{t.zh}。"),
    "find": ("{a.zh}{p.zh}找到了{t.zh}。", "后来，{a.zh}{p.zh}找到了{t.zh}。"),
    "discover": ("{a.zh}{p.zh}找到了{d.zh}。", "后来，{a.zh}{p.zh}找到了{d.zh}。"),
    "give": ("{a.zh}把{t.zh}给了{b.zh}。", "{a.zh}把{t.zh}送给了{b.zh}。"),
    "give_back": ("{a.zh}把{t.zh}还给了{b.zh}。", "后来，{a.zh}把{t.zh}还给了{b.zh}。"),
    "lend": ("{a.zh}把{t.zh}借给了{b.zh}。", "于是，{a.zh}把{t.zh}借给了{b.zh}。"),
    "bring": ("后来，{a.zh}给{b.zh}带来了{d.zh}。", "第二天，{a.zh}给{b.zh}带来了{d.zh}。"),
    "trade": (
        "{a.zh}把{t.zh}给了{b.zh}，{b.zh}把{u.zh}给了{a.zh}。",
        "两个人换了换，{a.zh}拿了{u.zh}，{b.zh}拿了{t.zh}。",
    ),
    "want": ("{a.zh}想要{t.zh_one}。", "{a.zh}很想要{t.zh_one}。"),
    "break": ("后来，{t.zh}坏了。", "可是，{t.zh}忽然坏了。"),
    "mend": ("{a.zh}{p.zh}修好了{t.zh}。", "后来，{a.zh}{p.zh}把{t.zh}修好了。"),
    "leave": ("{a.zh}把{t.zh}放{p.zh}。", "{a.zh}把{t.zh}留{p.zh}。"),
    "hide": ("{a.zh}把{t.zh}藏{p.zh}。", "为了好玩，{a.zh}把{t.zh}藏{p.zh}。"),
    "move": ("后来，{a.zh}把{t.zh}拿走，放{p.zh}。", "可是，{a.zh}把{t.zh}拿走，放{p.zh}。"),
    "race": ("{a.zh}和{b.zh}{p.zh}赛跑。", "后来，{a.zh}和{b.zh}{p.zh}比赛跑步。"),
    "win": ("{a.zh}跑得更快，赢了{d.zh}。", "{a.zh}跑得很快，赢了{d.zh}。"),
    "let_play": ("{a.zh}让{b.zh}也玩{t.zh}。", "后来，{a.zh}让{b.zh}也玩一会儿{t.zh}。"),
    "friends": ("{a.zh}和{b.zh}还是好朋友。", "{a.zh}和{b.zh}都笑了。"),
    "own_many": ("{a.zh}有{n.zh}。", "{a.zh}带着{n.zh}。"),
    "gather": ("{a.zh}{p.zh}找到了{n.zh}。", "{a.zh}{p.zh}捡到了{n.zh}。"),
    "give_many": ("{a.zh}给了{b.zh}{n.zh}。", "{a.zh}送给{b.zh}{n.zh}。"),
    "eat": ("{a.zh}吃了{n.zh}。", "于是，{a.zh}吃了{n.zh}。"),
    "cook": ("{a.zh}用{n.zh}做了一份{w.zh}。", "后来，{a.zh}用{n.zh}做了一份{w.zh}。"),
    "hungry": ("{a.zh}饿了。", "天晚了，{a.zh}饿了。"),
    "serve": ("{a.zh}把{w.zh}分给{b.zh}吃。", "{a.zh}请{b.zh}吃{w.zh}。"),
    "give_rest": ("{a.zh}把别的{t.zh}给了{b.zh}。", "{a.zh}把剩下的{t.zh}送给了{b.zh}。"),
    "together": ("{a.zh}和{b.zh}把{t.zh}放在一起。", "后来，{a.zh}和{b.zh}把{t.zh}放到一起。"),
    "plan": ("{a.zh}和{b.zh}去找{t.zh}。", "{a.zh}和{b.zh}一起出门找{t.zh}。"),
    "care": ("{a.zh}照顾{b.zh}。", "{a.zh}轻轻摸了摸{b.zh}。"),
    "look_in_vain": ("{a.zh}{p.zh}找了找，没有看到{t.zh}。", "{a.zh}{p.zh}找{t.zh}，可是没有找到。"),
    "tell": ("“{t.zh}{p.zh}。”{a.zh}说。", "{a.zh}告诉{b.zh}：“{t.zh}{p.zh}。”"),
    "laugh": ("{a.zh}和{b.zh}都笑了。", "“{b.zh}，你找到了！”{a.zh}说。"),
    "use": ("{a.zh}带着{t.zh}{p.zh}玩。", "{a.zh}带着{t.zh}{p.zh}玩了一天。"),
    "rain": ("忽然，下雨了。", "后来，天下起了雨。"),
    "feel": ("{a.zh}很{f.zh}，因为{why}。", "{a.zh}心里很{f.zh}，因为{why}。"),
    "thank": ("“谢谢你，{b.zh}！”{a.zh}说。", "{a.zh}说：“谢谢你，{b.zh}！”"),
}

REASONS: dict[str, str] = {
    "lost": "{t.zh}丢了",
    "found": "{t.zh}找回来了",
    "blown": "{t.zh}飞走了",
    "none": "{a.ta}没有{t.zh}",
    "none_many": "{a.ta}没有{t.zh}",
    "have": "{a.ta}有了{t.zh}",
    "kind": "{a.zh}很友好",
    "few": "{a.ta}想要更多的{t.zh}",
    "enough": "{t.zh}变多了",
    "most": "{a.ta}找到的{t.zh}更多",
    "broken": "{t.zh}坏了",
    "mended": "{t.zh}修好了",
    "hurt": "{b.zh}受伤了",
    "well": "{b.zh}好起来了",
    "gone": "{t.zh}不见了",
    "hungry": "{a.ta}饿了",
    "good": "{w.zh}很好吃",
    "sweet": "{t.zh}很甜",
    "won": "{a.ta}赢了比赛",
    "lost_race": "{a.ta}输了比赛",
    "not_there": "{t.zh}不{p.zh}",
    "safe": "{t.zh}没有丢",
    "wet": "{a.ta}淋湿了",
    "dry": "{a.ta}不再淋雨了",
}

ASKS: dict[str, tuple[str, ...]] = {
    "who_had": ("一开始谁有{t.zh}？", "一开始{t.zh}是谁的？"),
    "what_had": ("一开始{a.zh}有什么？", "{a.zh}一开始有什么？"),
    "who_has": ("最后谁有{t.zh}？", "最后{t.zh}在谁那里？"),
    "what_has": ("最后{a.zh}有什么？", "{a.zh}最后有什么？"),
    "who_lost": ("谁丢了{t.zh}？", "{t.zh}是谁丢的？"),
    "what_lost": ("{a.zh}丢了什么？", "请问{a.zh}丢了什么？"),
    "who_took": ("谁拿走了{t.zh}？", "{t.zh}被谁拿走了？"),
    "what_took": ("{a.zh}拿走了什么？", "请问{a.zh}拿走了什么？"),
    "who_found": ("谁找到了{t.zh}？", "{t.zh}是谁找到的？"),
    "what_found": ("{a.zh}找到了什么？", "请问{a.zh}找到了什么？"),
    "where_found": ("{a.zh}在哪里找到了{t.zh}？", "{t.zh}是{a.zh}在哪里找到的？"),
    "who_gave": ("谁送出了{t.zh}？", "{t.zh}是谁送的？"),
    "who_got": ("谁得到了{t.zh}？", "{t.zh}送给了谁？"),
    "what_gave": ("{a.zh}给了{b.zh}什么？", "{a.zh}送给{b.zh}什么？"),
    "what_gave_many": ("{a.zh}给了{b.zh}什么？", "{a.zh}送给{b.zh}什么？"),
    "who_lent": ("谁借出了{t.zh}？", "{t.zh}是谁借出的？"),
    "who_borrowed": ("谁借到了{t.zh}？", "{t.zh}借给了谁？"),
    "what_lent": ("{a.zh}借给了{b.zh}什么？", "{a.zh}借给{b.zh}什么？"),
    "who_brought": ("谁带来了{t.zh}？", "{t.zh}是谁带来的？"),
    "what_brought": ("{a.zh}带来了什么？", "请问{a.zh}带来了什么？"),
    "who_wanted": ("谁想要{t.zh_one}？", "谁很想要{t.zh_one}？"),
    "what_wanted": ("{a.zh}想要什么？", "请问{a.zh}想要什么？"),
    "who_mended": ("谁修好了{t.zh}？", "{t.zh}是谁修好的？"),
    "what_mended": ("{a.zh}修好了什么？", "请问{a.zh}修好了什么？"),
    "where_mended": ("{a.zh}在哪里修好了{t.zh}？", "{t.zh}是{a.zh}在哪里修好的？"),
    "who_left": ("谁先放下了{t.zh}？", "{t.zh}是谁先放下的？"),
    "where_left": ("{a.zh}把{t.zh}放在哪里？", "一开始{a.zh}把{t.zh}放在哪里？"),
    "who_hid": ("谁藏了{t.zh}？", "{t.zh}是谁藏的？"),
    "where_hid": ("{a.zh}把{t.zh}藏在哪里？", "{t.zh}被{a.zh}藏在哪里？"),
    "who_moved": ("谁拿走了{t.zh}？", "{t.zh}是谁拿走的？"),
    "where_moved": ("{a.zh}把{t.zh}放在哪里？", "请问{a.zh}把{t.zh}放在哪里？"),
    "where_is": ("最后{t.zh}在哪里？", "{t.zh}最后在哪里？"),
    "where_looked": ("{a.zh}先在哪里找{t.zh}？", "一开始{a.zh}在哪里找{t.zh}？"),
    "where_used": ("{a.zh}带着{t.zh}在哪里玩？", "{a.zh}在哪里带着{t.zh}玩？"),
    "where_was": ("一开始{a.zh}在哪里？", "{a.zh}一开始在哪里？"),
    "where_met": ("{a.zh}在哪里遇到了{b.zh}？", "{a.zh}和{b.zh}在哪里见面？"),
    "where_saw": ("{a.zh}在哪里看见了{b.zh}？", "{b.zh}在哪里？"),
    "who_saw": ("谁看见了{b.zh}？", "{b.zh}被谁看见了？"),
    "where_gathered": ("{a.zh}在哪里找到了{t.zh}？", "{a.zh}的{t.zh}是在哪里找到的？"),
    "who_won": ("谁赢了{t.zh}？", "{t.zh}是谁赢的？"),
    "what_won": ("{a.zh}赢了什么？", "请问{a.zh}赢了什么？"),
    "where_raced": ("比赛在哪里？", "{a.zh}和{b.zh}在哪里赛跑？"),
    "who_ate": ("谁吃了{t.zh}？", "{t.zh}是谁吃的？"),
    "who_cooked": ("谁做了{w.zh}？", "{w.zh}是谁做的？"),
    "many_had": (
        "一开始{a.zh}有几{t.measure}{t.zh}？",
        "{a.zh}一开始有几{t.measure}{t.zh}？",
    ),
    "many_found": ("{a.zh}找到了几{t.measure}{t.zh}？", "请问{a.zh}找到了几{t.measure}{t.zh}？"),
    "many_gave": ("{a.zh}给了{b.zh}几{t.measure}{t.zh}？", "{a.zh}送给{b.zh}几{t.measure}{t.zh}？"),
    "many_ate": ("{a.zh}吃了几{t.measure}{t.zh}？", "请问{a.zh}吃了几{t.measure}{t.zh}？"),
    "many_used": ("{a.zh}用了几{t.measure}{t.zh}？", "{w.zh}里有几{t.measure}{t.zh}？"),
    "many_now": ("{a.zh}还剩几{t.measure}{t.zh}？", "这时{a.zh}还有几{t.measure}{t.zh}？"),
    "many_got": ("{b.zh}得到了几{t.measure}{t.zh}？", "{a.zh}给了{b.zh}几{t.measure}{t.zh}？"),
    "many_together": (
        "{a.zh}和{b.zh}一共有几{t.measure}{t.zh}？",
        "一共有几{t.measure}{t.zh}？",
    ),
    "colour": ("{t.zh}是什么颜色的？", "{t.zh}是什么颜色？"),
    "feeling": ("{why}，这时{a.zh}心情怎么样？", "{why}，那时{a.zh}心情怎么样？"),
    "feeling_own": ("{why}，这时心情怎么样？", "{why}，那时心情怎么样？"),
    "why": ("{a.zh}为什么{f.zh}？", "为什么{a.zh}很{f.zh}？"),
}

STORY_REQUESTS = ("讲一个{a.zh}和{t.zh}的故事。", "请讲一个故事，里面有{a.zh}和{t.zh}。")

DRILLS: dict[str, tuple[str, ...]] = {
    "copy": ("请说：{words}。", "照着说：{words}。", "跟我说：{words}。"),
    "reverse": ("倒过来说：{words}。", "把词倒过来：{words}。", "反过来说：{words}。"),
    "bigger": ("{x}和{y}哪个大？", "哪个数更大，{x}还是{y}？"),
    "smaller": ("{x}和{y}哪个小？", "哪个数更小，{x}还是{y}？"),
    "count": (
        "有几{t.measure}{t.zh}：{words}？",
        "数一数有几{t.measure}{t.zh}：{words}。",
        "这里有几{t.measure}{t.zh}：{words}？",
    ),
    "plus": ("{x}加{y}等于几？", "{x}加{y}是多少？", "{x}+{y}=？"),
    "minus": ("{x}减{y}等于几？", "{x}减{y}是多少？", "{x}-{y}=？"),
    "to_chinese": ("用中文说：{words}。", "这个用中文怎么说：{words}？"),
    "to_english": ("用英文说：{words}。", "这个用英文怎么说：{words}？"),
    "tool": ("算一算{x}{sign}{y}。", "请计算{x}{sign}{y}。"),
}
WORD_SPACE = "、"
LIST_SPACE = "、"

# Nothing between the words: after a comma a model of this size cannot tell which of them it has to go on from.
ECHO_SPACE = ""
ECHO_TITLES = ("回声游戏", "跟我说", "回声")
ROLL_CALL = (
    "{a.zh}{p.zh}，有{t.zh}。",
    "{a.zh}{p.zh}玩，带着{t.zh}。",
    "{a.zh}{p.zh}。{a.zh}有{t.zh}。",
)
ROLL_CALL_PHRASES = {
    "who_had": ("谁有{t.zh}？", "{t.zh}在谁那里？"),
    "who_was": ("谁{p.zh}？", "请问谁{p.zh}？"),
    "what": ("{a.zh}有什么？", "请问{a.zh}有什么？"),
    "where": ("{a.zh}在哪里？", "请问{a.zh}在哪里？"),
    "where_thing": ("{t.zh}在哪里？", "请问{t.zh}在哪里？"),
    "colour": ASKS["colour"],
}
