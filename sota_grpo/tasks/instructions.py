"""Procedural prompts with instructions that a program can check: a training set for IFEval that needs no data.

A prompt is a request (a form and a topic) and one to three of IFEval's 25 instructions, in words of our own. Requests
belong to one side of the split each, for every seed, so that no held-out request is trained on in other words.

Instructions that contradict each other never meet. Each *decides* some aspects of a response (how it begins, its case,
its layout, ..) and *relies* on others: an end phrase decides the end, and relies on English and on its own letters. Two
may meet where neither decides what the other decides or relies on; words are drawn without repetition.

The words stand at the end. All of them are our own: none of these sentences stands in a prompt of the benchmark, nor is
what its authors say (``tests/unit/test_instructions.py`` compares).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sota_grpo.rewards.ifeval import read_instructions
from sota_grpo.rl.records import Example
from sota_grpo.tasks.dataset import Row, hash_ordered, normalised, unique_examples
from sota_grpo.tasks.ifeval import IFEvalTask
from sota_grpo.tasks.procedural import DrawnExamples, is_heldout

_CHOICE, _REPEAT = "detectable_format:constrained_response", "combination:repeat_prompt"
_NUM_INSTRUCTIONS = {1: 3, 2: 2, 3: 1}  # with their weights, near to the benchmark's

# What is drawn for an instruction. Ranges of n: what it wants fits into a hundred words.
_RELATIONS = {  # kwargs of the relation and of n, ranges of n for "at least" and for "less than"
    "keywords:frequency": ("relation", "frequency", (2, 4), (3, 4)),
    "keywords:letter_frequency": ("let_relation", "let_frequency", (5, 15), (3, 8)),
    "length_constraints:number_sentences": ("relation", "num_sentences", (3, 6), (4, 7)),
    "length_constraints:number_words": ("relation", "num_words", (30, 80), (40, 100)),
    "change_case:capital_word_frequency": ("capital_relation", "capital_frequency", (2, 5), (3, 8)),
}
_COUNTS = {  # kwarg of n, its range
    "length_constraints:number_paragraphs": ("num_paragraphs", 2, 4),
    "detectable_content:number_placeholders": ("num_placeholders", 2, 4),
    "detectable_format:number_bullet_lists": ("num_bullets", 2, 5),
    "detectable_format:number_highlighted_sections": ("num_highlights", 2, 4),
}

Kwargs = dict[str, Any]


class InstructionsTask(IFEvalTask):
    """Prompts of this module, graded as IFEval's are, with its options; held out are others, or those of a file."""

    name, hub_name = "instructions", ""  # its problems are made up

    @classmethod
    def load(  # type: ignore[override]
        cls,
        *,
        seed: int = 0,
        num_train: int = 8192,
        num_heldout: int = 512,
        eval_path: str | None = None,
        data_seed: int = 0,
        **options: Any,
    ) -> InstructionsTask:
        """Draw both splits from the seed; with ``eval_path``, hold out its prompts instead and never train on them.

        Args:
            seed: of the draw; which requests are held out is the same for every seed.
            num_train, num_heldout: lengths of the splits.
            eval_path: a local file or a name on the hub, in the format of IFEval or of RLVR-IFeval.
            data_seed: of the order of its rows.
            options: of the class.
        """
        task = cls(**options)
        examples = [] if eval_path is None else hash_ordered(unique_examples(task._read(eval_path)), data_seed)
        draw = partial(_draw, frozenset(normalised(example.query) for example in examples))
        task.train = DrawnExamples([draw], seed, False, num_train)
        task.heldout = examples or DrawnExamples([draw], seed, True, num_heldout)
        task._tell_of_sentences(_TEXTS)
        return task


def draw_row(rng: random.Random, heldout: bool) -> Row:
    """A row in IFEval's format: ``prompt``, ``instruction_id_list``, and ``kwargs`` with one mapping for each."""
    order = rng.sample(list(_TEXTS), len(_TEXTS))
    is_question = order[0] == _CHOICE
    forms = QUESTIONS if is_question else REQUESTS
    while True:
        form, topic = rng.choice(forms), rng.choice(list(TOPICS))
        if is_heldout((form, topic)) == heldout:
            break
    request, words = form.format(topic=topic), rng.sample(TOPICS[topic], len(TOPICS[topic]))
    num_instructions = rng.choices(list(_NUM_INSTRUCTIONS), list(_NUM_INSTRUCTIONS.values()))[0]
    chosen: dict[str, Kwargs] = {}
    for name in order:
        kwargs = _draw_kwargs(rng, name, words, request)
        decided, relied = _aspects(name, kwargs)
        others = [_aspects(*other) for other in chosen.items()]
        clashes = any(decided & (theirs | needed) or theirs & relied for theirs, needed in others)
        if not clashes and (is_question or name != _CHOICE):
            chosen[name] = kwargs
        if len(chosen) == num_instructions:
            break
    sentences = [_say(rng, name, kwargs) for name, kwargs in chosen.items()]
    prompt = _arrange(rng, request, sentences, request_first=_REPEAT in chosen)
    return {"prompt": prompt, "instruction_id_list": list(chosen), "kwargs": list(chosen.values())}


def _draw(taken: frozenset[str], rng: random.Random, heldout: bool) -> Example:
    while True:
        row = draw_row(rng, heldout)
        if normalised(row["prompt"]) not in taken:
            ids, kwargs = read_instructions(row)
            return Example(row["prompt"], "", {"instruction_id_list": ids, "kwargs": kwargs})


def _aspects(name: str, kwargs: Kwargs) -> tuple[set[str], set[str]]:
    """What an instruction decides and what it relies on."""
    decided, relied, _ = _TEXTS[name]
    asks_for_few = "less than" in kwargs.values()
    return {aspect.rstrip("?") for aspect in decided if asks_for_few or aspect[-1] != "?"}, set(relied)


def _draw_kwargs(rng: random.Random, name: str, words: list[str], request: str) -> Kwargs:
    """The kwargs of an instruction, all of them; ``words`` are the topic's that are left, and those used leave it."""
    if name in _RELATIONS:
        relation_kwarg, count_kwarg, at_least, less_than = _RELATIONS[name]
        relation = rng.choice(("at least", "less than"))
        count = rng.randint(*(at_least if relation == "at least" else less_than))
        kwargs = {relation_kwarg: relation, count_kwarg: 5 * (count // 5) if count_kwarg == "num_words" else count}
        if name == "keywords:frequency":
            return {"keyword": words.pop(), **kwargs}
        if name == "keywords:letter_frequency":
            return {"letter": rng.choice(LETTERS_TO_USE if relation == "at least" else LETTERS_TO_AVOID), **kwargs}
        return kwargs
    if name in _COUNTS:
        kwarg, *bounds = _COUNTS[name]
        return {kwarg: rng.randint(*bounds)}
    match name.partition(":")[2]:
        case "existence":
            return {"keywords": [words.pop() for _ in range(rng.randint(1, 3))]}
        case "forbidden_words":
            return {"forbidden_words": [words.pop() for _ in range(rng.randint(1, 2))]}
        case "response_language":
            return {"language": rng.choice(list(LANGUAGES))}
        case "nth_paragraph_first_word":
            count = rng.randint(2, 4)
            nth, word = rng.randint(1, count), rng.choice(FIRST_WORDS)
            return {"num_paragraphs": count, "nth_paragraph": nth, "first_word": word}
        case "multiple_sections":
            return {"section_spliter": rng.choice(SECTIONS), "num_sections": rng.randint(2, 4)}
        case "postscript":
            return {"postscript_marker": rng.choice(POSTSCRIPTS)}
        case "repeat_prompt":
            return {"prompt_to_repeat": request}
        case "end_checker":
            return {"end_phrase": rng.choice(END_PHRASES)}
    return {}


def _say(rng: random.Random, name: str, kwargs: Mapping[str, Any]) -> str:
    """The instruction in one of its wordings."""
    shown = dict(kwargs)
    for value in kwargs.values():
        if isinstance(value, int):
            shown["n"] = _number(rng, value)
            shown["below"] = _number(rng, value - 1)
        elif isinstance(value, list):
            shown["words"] = _listed([f'"{word}"' for word in value], "and" if "keywords" in kwargs else "or")
        elif value in AMOUNTS:
            shown["amount"] = rng.choice(AMOUNTS[value])
    if "amount" in shown:
        shown["amount"] = shown["amount"].format(**shown)
    if "language" in kwargs:
        shown["name"] = LANGUAGES[kwargs["language"]]
    if "section_spliter" in kwargs:
        shown["headings"] = "{section_spliter} 1 to {section_spliter} {num_sections}".format(**kwargs)
    if "nth_paragraph" in kwargs:
        shown["n"] = _number(rng, kwargs["num_paragraphs"])
        shown["nth"] = ORDINALS[kwargs["nth_paragraph"] - 1]
    return rng.choice(_TEXTS[name][2]).format(**shown)


def _number(rng: random.Random, value: int) -> str:
    return NUMERALS[value] if value < len(NUMERALS) and rng.random() < 0.5 else str(value)


def _listed(items: Sequence[str], word: str) -> str:
    """``a, b and c``."""
    return f" {word} ".join(filter(None, [", ".join(items[:-1]), items[-1]]))


def _arrange(rng: random.Random, request: str, sentences: Sequence[str], request_first: bool) -> str:
    """The request and what is asked of the answer: as one text, by lines, as a list, or the other way round."""
    as_text = f"{request} {' '.join(sentences)}"
    by_lines = "\n".join([request, "", *sentences])
    as_list = "\n".join([request, "", "Keep to these rules:", *(f"- {sentence}" for sentence in sentences)])
    turned_round = f"{' '.join(sentences)}\n\n{request}"
    ways = [as_text, by_lines, *([as_list] if len(sentences) > 1 else []), *([] if request_first else [turned_round])]
    return rng.choice(ways)


# topic: six words that an answer about it is likely to use; none stands in a request, nor inside another
_TOPICS = """
keeping bees: honey hive nectar swarm flower sting
old lighthouses: lantern keeper harbour storm beacon ship
baking bread: dough yeast flour oven crust knead
the night sky: star moon planet telescope comet galaxy
growing tomatoes: seed soil vine garden ripe compost
steam engines: boiler coal piston railway whistle furnace
learning to swim: pool breath stroke float water goggles
volcanoes: lava magma crater eruption smoke mountain
making cheese: milk rennet curd cellar cream mould
street musicians: guitar melody crowd violin coin tune
winter walks: snow boots scarf frost icicle mitten
paper boats: fold river sail pond stream crease
desert animals: camel sand scorpion lizard burrow cactus
the history of chess: queen pawn knight castle checkmate rook
mending clothes: needle thread button stitch fabric sleeve
city parks: bench tree fountain pigeon meadow lawn
owls: feather beak talon forest mouse hoot
the circus: clown acrobat tent trapeze juggler elephant
drinking tea: kettle leaf sugar lemon porcelain biscuit
deep sea fish: ocean submarine coral tentacle shark darkness
building a treehouse: hammer plank nail ladder branch rope
trains at night: station ticket sleeper signal platform window
learning the piano: note chord scale pedal lesson finger
wild mushrooms: basket spore oak poison chanterelle moss
sending postcards: stamp letterbox holiday postman picture greeting
riding a bicycle: wheel brake helmet saddle bell chain
the first aeroplanes: pilot propeller engine runway cloud hangar
the life of ants: colony tunnel worker larva crumb anthill
clocks and watches: minute spring pendulum gear hand hour
carnival masks: costume glitter dance parade drum disguise
rainy days: umbrella puddle thunder drizzle roof raincoat
a village market: stall apple basket carrot trader bargain
pirates: treasure parrot island cannon captain cutlass
making candles: wax wick flame scent mould lavender
penguins: iceberg egg flipper colony krill blizzard
running a marathon: shoe sweat finish runner medal stamina
secret codes: cipher spy message riddle decode alphabet
windmills: grain miller sail breeze grindstone blade
board games: dice rule player token card victory
the rainforest: jaguar monkey canopy orchid river humidity
friendly robots: battery sensor metal circuit wire gadget
dinosaurs: fossil bone skeleton reptile extinct claw
a day at the beach: wave shell towel sunburn sandcastle seagull
pottery: clay glaze kiln vase wheel bowl
climbing mountains: summit rope glacier cliff avalanche backpack
family photographs: camera album smile frame grandmother portrait
folk dances: fiddle skirt circle step partner rhythm
saving energy: bulb solar insulation heating electricity radiator
stray cats: kitten whisker paw purr alley fur
maps and globes: compass border continent equator atlas scale
school lunches: sandwich tray soup yoghurt canteen fruit
the moon landing: astronaut rocket capsule crater gravity helmet
learning to cook: pan onion recipe spice knife pepper
old castles: tower dungeon moat drawbridge siege wall
wooden toys: carve puppet spinning varnish block sandpaper
waterfalls: mist rapids gorge rainbow spray rock
bird migration: flock nest feather swallow season goose
the invention of printing: press alphabet page typeface pamphlet manuscript
fire fighters: hose ladder siren alarm rescue smoke
chocolate: cocoa sugar bean bitter truffle wrapper
campfires: tent spark marshmallow ember ash blanket
football in the rain: goal referee mud whistle striker jersey
the Silk Road: caravan merchant camel spice porcelain oasis
autumn leaves: maple rake acorn harvest squirrel pumpkin
"""
TOPICS = {
    topic.strip(): tuple(words.split())
    for topic, _, words in (line.partition(":") for line in _TOPICS.split("\n")[1:-1])
}

# Requests that leave length and layout open, so that any instruction can be followed; each is one sentence.
REQUESTS = (
    "Write a short story about {topic}.",
    "Tell a ten-year-old something about {topic}.",
    "Write to an old friend about {topic}.",
    "Write a poem about {topic} that sounds cheerful.",
    "Say what most of us get wrong about {topic}.",
    "Write an entry for the blog of a small museum about {topic}.",
    "Give advice to somebody who is curious about {topic}.",
    "Write the words of a song about {topic}.",
    "Let two neighbours talk about {topic}.",
    "Write what a traveller could put into a diary about {topic}.",
    "Announce an evening talk about {topic}.",
    "Write a speech for a class that has spent a week on the subject of {topic}.",
    "Tell a joke about {topic} and say why it is funny.",
    "Report for a local newspaper on the subject of {topic}.",
    "Ask a colleague by email for help with an article about {topic}.",
    "Review an imaginary book about {topic}.",
    "Invent a legend about {topic}.",
    "Argue that every school should teach something about {topic}.",
    "Describe a painting about {topic} to someone who cannot see it.",
    "Plan an afternoon for a family that would like to learn about {topic}.",
    "Interview an imaginary expert about {topic}.",
    "Sketch the opening scene of a play about {topic}.",
    "Suggest a gift for someone who cares about {topic}.",
    "Compare what people once believed with what they know now about {topic}.",
    "Comfort a worried parent who asks about {topic}.",
    "Share some surprising facts about {topic}.",
)
QUESTIONS = (  # for the one instruction that allows three answers only
    "Should all children hear about {topic} before they leave school?",
    "Would you enjoy a long film about {topic}?",
    "Is it easy to find a good teacher who knows about {topic}?",
    "Do most grown-ups know enough about {topic}?",
    "Will anybody still talk about {topic} in two hundred years?",
    "Can one make a living from knowing a lot about {topic}?",
)

END_PHRASES = (
    "That is all for today.",
    "Now you know as much as I do.",
    "Let me know what you think.",
    "I hope that this was of use to you.",
    "And so the tale is told.",
    "More about it another time.",
    "With that I say goodbye.",
    "The rest is up to you.",
    "Would you like to hear more?",
    "Who would have thought so?",
    "This is where it ends.",
    "Try it for yourself!",
)
FIRST_WORDS = (
    *("today", "meanwhile", "however", "once", "nobody"),
    *("everyone", "sometimes", "perhaps", "later", "finally"),
)
SECTIONS = ("Section", "SECTION", "Part", "PART", "Chapter", "CHAPTER", "Topic", "Day")
POSTSCRIPTS = ("P.S.", "P.P.S")
LETTERS_TO_USE = "aeioulnrst"
LETTERS_TO_AVOID = "bcfgjkmpvwxyz"
LANGUAGES = {
    **{"ar": "Arabic", "bg": "Bulgarian", "bn": "Bengali", "de": "German", "es": "Spanish", "fa": "Persian"},
    **{"fi": "Finnish", "fr": "French", "gu": "Gujarati", "hi": "Hindi", "it": "Italian", "kn": "Kannada"},
    **{"ko": "Korean", "mr": "Marathi", "ne": "Nepali", "pa": "Punjabi", "pt": "Portuguese", "ru": "Russian"},
    **{"sw": "Swahili", "ta": "Tamil", "te": "Telugu", "th": "Thai", "ur": "Urdu", "vi": "Vietnamese"},
}
AMOUNTS = {  # of n, and of the number below it
    "at least": ("at least {n}", "no fewer than {n}", "a minimum of {n}", "{n} or more"),
    "less than": ("fewer than {n}", "less than {n}", "no more than {below}", "at most {below}"),
}
NUMERALS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
ORDINALS = ("first", "second", "third", "fourth")

# Instruction | aspects that it decides, with "?" only where it asks for few | those that it relies on; its wordings.
# What is between braces: {words} quoted and listed, {amount} of AMOUNTS, {n} a number, and the kwargs themselves.
_INSTRUCTIONS = """
keywords:existence | | language letters
  Include {words} in your response.
  Your response must contain {words}.
  Use {words} somewhere in your answer.
  Your text has to contain {words}.
  Work in {words}.
  Make sure that {words} can be found in what you write.
  It should mention {words}.
keywords:frequency | | language letters
  Your response must contain the word "{keyword}" {amount} times.
  The word "{keyword}" should occur {amount} times in your response.
  Use the word "{keyword}" {amount} times.
  The word "{keyword}" is to be used {amount} times.
  Let "{keyword}" occur {amount} times in your text.
  I want to read the word "{keyword}" {amount} times.
keywords:forbidden_words | | language
  Your response must not contain {words}.
  Do not use {words} in your response.
  Do without {words}.
  You may not use {words}.
  Never write {words}.
  Avoid {words} in all that you say.
  Get by without {words}.
keywords:letter_frequency | letters? | language
  Your response must contain the letter "{letter}" {amount} times.
  The letter "{letter}" should occur {amount} times in your response.
  Use the letter "{letter}" {amount} times.
  The letter "{letter}" has to come up {amount} times, large or small.
  Counted over your whole text, the letter "{letter}" is used {amount} times.
  Write it so that "{letter}" is needed {amount} times as a letter.
language:response_language | language |
  Your whole response must be written in {name}.
  Respond in the {name} language only.
  Answer in {name} only.
  Write everything in {name}.
  My family reads {name}, so use that language and no other.
  Please reply in {name} from the beginning to the end.
  The text has to be in {name}.
length_constraints:number_sentences | length layout? | language
  Your response must have {amount} sentences.
  Say it in {amount} sentences.
  Make it {amount} sentences.
  Your answer should come to {amount} sentences.
  Take {amount} sentences for it.
length_constraints:number_paragraphs | layout |
  Your response must have exactly {n} paragraphs with the markdown divider *** between them.
  Write {n} paragraphs and put a line with *** between each two of them.
  Divide the text into {n} paragraphs by lines that hold three asterisks (***).
  I need exactly {n} paragraphs, with *** as the mark between one and the next.
  Cut your answer into {n} paragraphs; the sign for a cut is ***.
length_constraints:number_words | length layout? | language
  Your response must have {amount} words.
  The text is to have {amount} words.
  Say it in {amount} words.
  Your text should come to {amount} words.
  Keep it to {amount} words in all.
  Its length must be {amount} words.
length_constraints:nth_paragraph_first_word | layout start | language letters
  Respond in {n} paragraphs, two line breaks between them; the {nth} must start with the word "{first_word}".
  Write {n} paragraphs with an empty line between them, and begin the {nth} one with the word "{first_word}".
  Make it {n} paragraphs, set apart by blank lines; "{first_word}" is the first word of the {nth} paragraph.
  Your answer has {n} paragraphs (one empty line between two), the {nth} of which opens with "{first_word}".
detectable_content:number_placeholders | | markup
  Your response must include at least {n} placeholders in square brackets, for example [address].
  Leave {n} or more blanks to fill in, each written in square brackets like [name] or [date].
  Put at least {n} gaps into the text, each a word in square brackets, for instance [place].
  Wherever a detail is missing, write a stand-in such as [time]; use no fewer than {n} of these.
  It is a form letter for many readers, so use at least {n} fields such as [colour].
detectable_content:postscript | end | language letters case
  Your response must have a postscript at the end that starts with {postscript_marker}
  Add a remark after the text that begins with {postscript_marker}
  Below your text there should be one more thought, introduced by {postscript_marker}
  Close with an afterthought behind the letters {postscript_marker}
  When you are done, append a last note that opens with {postscript_marker}
detectable_format:number_bullet_lists | layout |
  Your response must contain exactly {n} bullet points in markdown, each on a line that starts with * or -.
  Give exactly {n} bullet points, each on a line of its own that begins with an asterisk or a hyphen.
  Use a list of {n} points, no more and no fewer, in markdown ("* like this").
  Include a markdown list with exactly {n} bullets.
  Put what matters into {n} bullets; every one starts a new line with "- ".
detectable_format:constrained_response | start end layout length case language letters markup commas |
  Respond with one of these options only: "My answer is yes.", "My answer is no.", "My answer is maybe."
  Reply with nothing but one of these three: "My answer is yes." "My answer is no." "My answer is maybe."
  There are three possible replies: "My answer is yes.", "My answer is no.", "My answer is maybe."; pick one.
  Choose between "My answer is yes.", "My answer is no." and "My answer is maybe.", and write just that.
detectable_format:number_highlighted_sections | | markup
  Highlight {n} or more parts of your response in markdown, for example *highlighted part*.
  Emphasise {n} or more phrases by putting an asterisk on either side, *like this*.
  Set at least {n} passages in italics as markdown does it: *passage*.
  Mark what matters with single asterisks (*so*), in {n} places or more.
  No fewer than {n} phrases should be in *asterisks* for emphasis.
detectable_format:multiple_sections | layout | language letters case
  Your response must consist of {n} sections that are marked {headings}.
  Divide it into {n} parts under the headings {headings}.
  Structure your text by {n} headings, namely {headings}.
  Write {n} parts and number them in this way: {headings}.
  It needs {n} parts; the lines above them are {headings}.
detectable_format:json_format | start end layout length case markup | language commas
  Your response must be in JSON format from its first to its last character.
  Reply with a JSON object and nothing else.
  Everything you write must be valid JSON.
  A program reads your answer, so give it as JSON without any text around it.
  Format the whole answer as one JSON value; a fence of backticks around it is fine.
detectable_format:title | | markup
  Your response must have a title in double angular brackets, for example <<a new day>>.
  Give it a title and put that between << and >>.
  Add a heading in double angle brackets, <<like this>>.
  It needs a title, written as <<title>>.
  Name your text in a line such as <<My title>>.
combination:two_responses | layout | start end length
  Give me two different responses with 6 asterisks between them, that is ******
  Answer twice, in two different ways, and put ****** between the two.
  I would like two versions to choose from, with a line of six asterisks (******) after the first one.
  Write two answers that differ; the mark between them, and only there, is ******
  Offer two alternatives divided by ******
combination:repeat_prompt | start | language letters case length commas
  First repeat the request "{prompt_to_repeat}" word for word, and after that give your answer.
  Before anything else, copy this sentence as it is: "{prompt_to_repeat}" Then do what it says.
  Your answer has to start with the words "{prompt_to_repeat}" and go on from there.
  Open with my request in the same words, that is "{prompt_to_repeat}", and only then answer it.
startend:end_checker | end | language letters case
  Your response must end with the exact phrase "{end_phrase}"
  The last words have to be "{end_phrase}"
  Stop with the sentence "{end_phrase}" and write nothing behind it.
  End on exactly these words: "{end_phrase}"
  Let "{end_phrase}" be the very end of your answer.
change_case:capital_word_frequency | case | language
  Your response must contain {amount} words in all capital letters.
  Have {amount} words in capitals, LIKE THIS.
  Put {amount} words into capital letters from the first to the last, as in YES.
  There should be {amount} words that consist of capitals alone.
change_case:english_capital | case | language
  Your response must be in English and in capital letters only.
  Write in English, with capital letters from start to finish.
  USE CAPITALS ONLY, in plain English.
  Answer in English as if the caps lock key were stuck.
  Every letter of your English text has to be a capital one.
change_case:english_lowercase | case | language
  Your response must be in English and in lowercase letters only.
  Write in English without a single capital letter.
  use small letters only, even at the beginning of a sentence, in plain english.
  Answer in English as if your keyboard had no shift key, all in lower case.
  Every letter of your English text has to be a small one, names included.
punctuation:no_comma | commas |
  Your response must not contain any comma.
  Leave all commas out.
  Write it without commas.
  Commas are forbidden.
  Get by without a single comma.
  The character "," must be missing from your answer.
startend:quotation | start end |
  Your response must begin and end with double quotation marks.
  Put quotation marks (") around all that you write.
  The first and the last character of your answer must be a double quote.
  Your text is a quotation as a whole: open it with " and close it with ".
  Enclose the complete answer in double quotes.
"""


def _read_text(block: str) -> tuple[str, tuple[list[str], list[str], list[str]]]:
    first, *ways = map(str.strip, block.split("\n"))
    name, decides, relies = map(str.strip, first.split("|"))
    return name, (decides.split(), relies.split(), ways)


_TEXTS = dict(map(_read_text, re.split(r"\n(?=\S)", _INSTRUCTIONS.strip())))
