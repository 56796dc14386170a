"""English: how events, reasons, questions and requests of the toy world are worded.

Each table maps a key to several phrasings; `{a.en}` and the like are read from the lexicon entry that plays role `a`.
Roles: a, b beings; t, u things; d described thing; n amount; p place; f feeling; w dish; why a reason already worded.
"""

from __future__ import annotations

REFUSAL = "The story does not say."
BECAUSE = "because {why}"

EVENTS: dict[str, tuple[str, ...]] = {
    "stay": ("{a.en} played {p.en}.", "{a.en} was {p.en}."),
    "own": ("{a.en} had {d.en}.", "{a.en} had {d.en} with {a.him}."),
    "with": ("{a.en} was {p.en} with {d.en}.", "{a.en} had {d.en} {p.en}."),
    "meet": ("{a.en} met {b.en} {p.en}.", "Then {a.en} saw {b.en} {p.en}."),
    "see": ("{a.en} saw {b.en_a} {p.en}.", "Then {a.en} met {b.en_a} {p.en}."),
    "lose": ("Then {a.en} lost the {t.en}.", "But soon {a.en} could not find the {t.en}."),
    "blow": ("Then the wind blew the {t.en} away.", "Suddenly the wind took the {t.en}."),
    "take": ("Then {b.en_a} took the {t.en} away.", "Suddenly {b.en_a} came and took the {t.en}."),
    "search": ("{a.en} and {b.en} looked for the {t.en}.", "{b.en} helped {a.en} to look for the {t.en}."),
    "find": ("{a.en} found the {t.en} {p.en}.", "Then {a.en} found the {t.en} {p.en}."),
    "discover": ("{a.en} found {d.en} {p.en}.", "Then {a.en} found {d.en} {p.en}."),
    "give": ("{a.en} gave the {t.en} to {b.en}.", "{a.en} gave {b.en} the {t.en}."),
    "give_back": ("{a.en} gave the {t.en} back to {b.en}.", "{a.en} brought the {t.en} back to {b.en}."),
    "lend": ("{a.en} lent the {t.en} to {b.en}.", "{a.en} lent {b.en} the {t.en}."),
    "bring": ("Later {a.en} brought {b.en} {d.en}.", "The next day {a.en} brought {b.en} {d.en}."),
    "trade": (
        "{a.en} gave {b.en} the {t.en}, and {b.en} gave {a.en} the {u.en}.",
        "So {a.en} took the {u.en}, and {b.en} took the {t.en}.",
    ),
    "want": ("{a.en} wanted {t.en_a}.", "{a.en} wished for {t.en_a}."),
    "break": ("Then the {t.en} broke.", "But suddenly the {t.en} broke."),
    "mend": ("{a.en} mended the {t.en} {p.en}.", "Then {a.en} mended the {t.en} {p.en}."),
    "leave": ("{a.en} left the {t.en} {p.en}.", "{a.en} put the {t.en} down {p.en}."),
    "hide": ("{a.en} hid the {t.en} {p.en}.", "For fun, {a.en} hid the {t.en} {p.en}."),
    "move": ("Then {a.en} came and put the {t.en} {p.en}.", "But {a.en} took the {t.en} and put it {p.en}."),
    "race": ("{a.en} and {b.en} ran a race {p.en}.", "Then {a.en} and {b.en} had a race {p.en}."),
    "win": ("{a.en} was faster and won {d.en}.", "{a.en} ran fast and won {d.en}."),
    "let_play": ("{a.en} let {b.en} play with the {t.en} too.", "Then {a.en} let {b.en} have a turn with the {t.en}."),
    "friends": ("{a.en} and {b.en} were still good friends.", "{a.en} and {b.en} laughed and played."),
    "own_many": ("{a.en} had {n.en}.", "{a.en} had {n.en} with {a.him}."),
    "gather": ("{a.en} found {n.en} {p.en}.", "{a.en} picked up {n.en} {p.en}."),
    "give_many": ("{a.en} gave {n.en} to {b.en}.", "{a.en} gave {b.en} {n.en}."),
    "eat": ("{a.en} ate {n.en}.", "So {a.en} ate {n.en}."),
    "cook": ("{a.en} made {w.en_a} with {n.en}.", "Then {a.en} made {w.en_a} from {n.en}."),
    "hungry": ("{a.en} was hungry.", "It was late, and {a.en} was hungry."),
    "serve": ("{a.en} gave {b.en} some {w.en}.", "{a.en} shared the {w.en} with {b.en}."),
    "give_rest": ("{a.en} gave the other {t.plural} to {b.en}.", "{b.en} got the other {t.plural} from {a.en}."),
    "together": ("{a.en} and {b.en} put the {t.plural} together.", "Then {a.en} and {b.en} shared all the {t.plural}."),
    "plan": ("{a.en} and {b.en} looked for {t.plural}.", "{a.en} and {b.en} went out to find {t.plural}."),
    "care": ("{a.en} took care of {b.en}.", "{a.en} sat down with {b.en}."),
    "look_in_vain": (
        "{a.en} looked {p.en}, but the {t.en} was not there.",
        "{a.en} looked for the {t.en} {p.en}, but could not find it.",
    ),
    "tell": ('"The {t.en} is {p.en}," said {a.en}.', '{a.en} told {b.en}, "The {t.en} is {p.en}."'),
    "laugh": ("{a.en} and {b.en} laughed.", '"You found it, {b.en}!" said {a.en}.'),
    "use": ("{a.en} had the {t.en} {p.en} all day.", "All day {a.en} had the {t.en} {p.en}."),
    "rain": ("Then it began to rain.", "Suddenly it began to rain."),
    "feel": ("{a.en} was {f.en} because {why}.", "{a.en} felt {f.en} because {why}."),
    "thank": ('"Thank you, {b.en}!" said {a.en}.', '{a.en} said, "Thank you, {b.en}!"'),
}

REASONS: dict[str, str] = {
    "lost": "the {t.en} was lost",
    "found": "the {t.en} was back",
    "blown": "the {t.en} flew away",
    "none": "{a.he} had no {t.en}",
    "none_many": "{a.he} had no {t.plural}",
    "have": "{a.he} got the {t.en}",
    "kind": "{a.en} was kind",
    "few": "{a.he} wanted more {t.plural}",
    "enough": "there were more {t.plural}",
    "most": "{a.he} found more {t.plural}",
    "broken": "the {t.en} was broken",
    "mended": "the {t.en} was fine again",
    "hurt": "{b.en} was hurt",
    "well": "{b.en} was well again",
    "gone": "the {t.en} was gone",
    "hungry": "{a.he} was hungry",
    "good": "the {w.en} was good",
    "sweet": "the {t.plural} were sweet",
    "won": "{a.he} won the race",
    "lost_race": "{a.he} lost the race",
    "not_there": "the {t.en} was not {p.en}",
    "safe": "the {t.en} was safe",
    "wet": "{a.he} was wet",
    "dry": "{a.he} was dry",
}

ASKS: dict[str, tuple[str, ...]] = {
    "who_had": ("Who had the {t.en} at first?", "At first, who had the {t.en}?"),
    "what_had": ("What did {a.en} have at first?", "At first, what did {a.en} have?"),
    "who_has": ("Who had the {t.en} at the end?", "In the end, who had the {t.en}?"),
    "what_has": ("What did {a.en} have at the end?", "In the end, what did {a.en} have?"),
    "who_lost": ("Who lost the {t.en}?", "Tell me who lost the {t.en}."),
    "what_lost": ("What did {a.en} lose?", "Tell me what {a.en} lost."),
    "who_took": ("Who took the {t.en} away?", "Who came and took the {t.en}?"),
    "what_took": ("What did {a.en} take?", "Tell me what {a.en} took."),
    "who_found": ("Who found the {t.en}?", "Tell me who found the {t.en}."),
    "what_found": ("What did {a.en} find?", "Tell me what {a.en} found."),
    "where_found": ("Where did {a.en} find the {t.en}?", "Where was the {t.en} when {a.en} found it?"),
    "who_gave": ("Who gave the {t.en} away?", "Tell me who gave the {t.en} away."),
    "who_got": ("Who was given the {t.en}?", "Tell me who was given the {t.en}."),
    "what_gave": ("What did {a.en} give to {b.en}?", "What did {a.en} give {b.en}?"),
    "what_gave_many": ("What did {a.en} give to {b.en}?", "What did {a.en} give {b.en}?"),
    "who_lent": ("Who lent the {t.en}?", "Tell me who lent the {t.en}."),
    "who_borrowed": ("Who borrowed the {t.en}?", "Tell me who borrowed the {t.en}."),
    "what_lent": ("What did {a.en} lend to {b.en}?", "What did {a.en} lend {b.en}?"),
    "who_brought": ("Who brought the {t.en}?", "Tell me who brought the {t.en}."),
    "what_brought": ("What did {a.en} bring?", "Tell me what {a.en} brought."),
    "who_wanted": ("Who wanted {t.en_a}?", "Who wished for {t.en_a}?"),
    "what_wanted": ("What did {a.en} want?", "What did {a.en} wish for?"),
    "who_mended": ("Who mended the {t.en}?", "Tell me who mended the {t.en}."),
    "what_mended": ("What did {a.en} mend?", "Tell me what {a.en} mended."),
    "where_mended": ("Where did {a.en} mend the {t.en}?", "Where was the {t.en} mended?"),
    "who_left": ("Who left the {t.en} behind?", "Tell me who left the {t.en} behind."),
    "where_left": ("Where did {a.en} leave the {t.en}?", "Where was the {t.en} left?"),
    "who_hid": ("Who hid the {t.en}?", "Tell me who hid the {t.en}."),
    "where_hid": ("Where did {a.en} hide the {t.en}?", "Where was the {t.en} hidden?"),
    "who_moved": ("Who moved the {t.en}?", "Tell me who moved the {t.en}."),
    "where_moved": ("Where did {a.en} put the {t.en}?", "Tell me where {a.en} put the {t.en}."),
    "where_is": ("Where was the {t.en} at the end?", "In the end, where was the {t.en}?"),
    "where_looked": ("Where did {a.en} look first?", "Where did {a.en} look for the {t.en} first?"),
    "where_used": ("Where did {a.en} have the {t.en}?", "Tell me where {a.en} had the {t.en}."),
    "where_was": ("Where was {a.en} at first?", "At first, where was {a.en}?"),
    "where_met": ("Where did {a.en} meet {b.en}?", "Where did {a.en} and {b.en} meet?"),
    "where_saw": ("Where did {a.en} see {b.en}?", "Where was {b.en}?"),
    "who_saw": ("Who saw {b.en}?", "Tell me who saw {b.en}."),
    "where_gathered": ("Where did {a.en} find the {t.plural}?", "Tell me where {a.en} found {t.plural}."),
    "who_won": ("Who won the {t.en}?", "Tell me who won the {t.en}."),
    "what_won": ("What did {a.en} win?", "Tell me what {a.en} won."),
    "where_raced": ("Where was the race?", "Where did {a.en} and {b.en} run?"),
    "who_ate": ("Who ate some {t.plural}?", "Tell me who ate some {t.plural}."),
    "who_cooked": ("Who made {w.en_a}?", "Tell me who made {w.en_a}."),
    "many_had": ("How many {t.plural} did {a.en} have at first?", "At first, how many {t.plural} did {a.en} have?"),
    "many_found": ("How many {t.plural} did {a.en} find?", "Tell me how many {t.plural} {a.en} found."),
    "many_gave": ("How many {t.plural} did {a.en} give to {b.en}?", "How many {t.plural} did {a.en} give {b.en}?"),
    "many_ate": ("How many {t.plural} did {a.en} eat?", "Tell me how many {t.plural} {a.en} ate."),
    "many_used": ("How many {t.plural} were in the {w.en}?", "How many {t.plural} did {a.en} use?"),
    "many_now": ("How many {t.plural} did {a.en} have left?", "How many {t.plural} did {a.en} still have?"),
    "many_got": ("How many {t.plural} did {b.en} get?", "How many {t.plural} did {b.en} get from {a.en}?"),
    "many_together": (
        "How many {t.plural} did {a.en} and {b.en} have together?",
        "How many {t.plural} were there in all?",
    ),
    "colour": ("What colour was the {t.en}?", "Tell me the colour of the {t.en}."),
    "feeling": ("How did {a.en} feel when {why}?", "When {why}, how did {a.en} feel?"),
    "why": ("Why was {a.en} {f.en}?", "Why did {a.en} feel {f.en}?"),
}

STORY_REQUESTS = ("Tell a story about {a.en} and {t.en_a}.", "Tell me a story with {a.en} and {t.en_a}.")

DRILLS: dict[str, tuple[str, ...]] = {
    "copy": ("Say: {words}.", "Copy: {words}.", "Repeat the words: {words}."),
    "reverse": ("Say it backwards: {words}.", "Turn the words around: {words}.", "Reverse the words: {words}."),
    "bigger": ("Which is bigger, {x} or {y}?", "Which number is bigger: {x} or {y}?"),
    "smaller": ("Which is smaller, {x} or {y}?", "Which number is smaller: {x} or {y}?"),
    "count": (
        "How many {t.plural}: {words}?",
        "Count the {t.plural}: {words}.",
        "How many {t.plural} are here: {words}?",
    ),
    "plus": ("What is {x} + {y}?", "How much is {x} + {y}?", "{x} + {y} = ?"),
    "minus": ("What is {x} - {y}?", "How much is {x} - {y}?", "{x} - {y} = ?"),
    "to_chinese": ("Say in Chinese: {words}.", "What is this in Chinese: {words}?"),
    "to_english": ("Say in English: {words}.", "What is this in English: {words}?"),
    "tool": ("Work out {x} {sign} {y}.", "Calculate {x} {sign} {y}."),
}
WORD_SPACE = " "
LIST_SPACE = " "

ECHO_SPACE = " "
ECHO_TITLES = ("The echo game", "Say it after me", "Echo")
ROLL_CALL = (
    "{a.en} was {p.en} with {t.en}.",
    "{a.en} had {t.en} {p.en}.",
    "{a.en} was {p.en}. {a.en} had {t.en}.",
)
ROLL_CALL_PHRASES = {
    "who_had": ("Who had the {t.en}?", "Tell me who had the {t.en}."),
    "who_was": ("Who was {p.en}?", "Tell me who was {p.en}."),
    "what": ("What did {a.en} have?", "Tell me what {a.en} had."),
    "where": ("Where was {a.en}?", "Tell me where {a.en} was."),
    "where_thing": ("Where was the {t.en}?", "Tell me where the {t.en} was."),
    "colour": ASKS["colour"],
}
