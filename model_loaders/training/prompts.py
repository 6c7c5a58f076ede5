"""What a target is asked to write about, so that its draft sees text like its users'.

Self-written prompts in the manner of Magpie (arXiv 2406.08464): the chat template's opening of a user turn,
mostly with the first words of a question, and the target goes on until it ends the turn. Then the template's
opening of the assistant's turn, and the target answers itself.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_loaders.errors import CheckpointError

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful maths tutor. Show every step of your reasoning.",
    "You are an experienced programmer. Write clear, correct code and explain it briefly.",
    "You are a friendly teacher who explains things simply, with examples.",
    "Answer concisely.",
    "You are a creative writer with a vivid style.",
    "You are an expert editor. Improve the user's text.",
    "You are a knowledgeable scientist. Be precise.",
    "You are a historian who answers with dates and context.",
    "You are a travel guide who gives practical advice.",
    "Think step by step before you answer.",
    "You are a business consultant. Structure your answers with headings and lists.",
)

TOPICS = (
    "photosynthesis", "the French Revolution", "machine learning", "a balanced diet", "black holes", "jazz",
    "the water cycle", "inflation", "public speaking", "electric cars", "the Roman Empire", "chess",
    "vaccines", "a small garden", "time management", "plate tectonics", "a long hike", "the stock market",
    "coffee", "renewable energy", "ancient Egypt", "good sleep", "the immune system", "space travel",
    "a job interview", "Shakespeare", "climate change", "neural networks", "the ocean", "a family holiday",
    "cooking pasta", "the human brain", "recycling", "a lost dog", "quantum mechanics", "the Renaissance",
    "basketball", "learning a language", "a small business", "cryptography", "bees", "mountain weather",
    "friendship", "an old lighthouse", "the printing press", "meditation", "databases", "evolution",
    "a robot", "taxes", "painting", "the solar system", "a school project", "remote work", "volcanoes",
    "poetry", "a budget", "operating systems", "the digestive system", "tea", "a dragon", "gravity",
    "marketing", "dinosaurs", "a birthday party", "democracy", "photography", "DNA", "a detective",
    "city traffic", "rivers", "music theory", "home insulation", "the Cold War", "running a marathon",
    "social media", "a spaceship crew", "probability", "bread", "wild animals", "a mystery in a library",
    "the internet", "patience", "statistics", "cats",
)  # fmt: skip

GENERAL = (
    "", "Explain", "Explain how {topic}", "What is", "What are the main", "Why", "How can I", "How do",
    "Write a short story about {topic}", "Write a poem about {topic}", "Write a blog post about {topic}",
    "Describe", "Compare", "What is the difference between", "Give me five tips for {topic}", "List",
    "Summarize", "Compose an email", "Draft a letter", "Tell me about {topic}", "Imagine", "Pretend you are",
    "Suggest", "Can you", "I need help with {topic}", "I want to learn about {topic}", "Who", "When did",
    "Rewrite the following sentence", "Translate", "Discuss", "Create a plan for {topic}", "Help me",
    "Is it true that", "What would happen if", "Analyze", "Write a dialogue between",
    "Outline an essay on {topic}", "Should I", "Classify", "Extract", "Provide an example of", "Design",
    "Act as", "How does {topic}",
)  # fmt: skip

CODE = (
    "Write a python function to", "Write a Python function that takes a list", "Write a function to find",
    "Write a Python program", "Write a function that checks whether", "Write a python function to count",
    "Write a function to sort", "Write a python function which returns", "Implement",
    "Write a function to convert", "Write a python function to remove", "Write a class", "How do I",
    "Fix the bug in this code:\n```python\n", "Complete this function:\n```python\ndef ",
    "Complete this Python code and explain it:\n```python\n", "Write a SQL query",
    "Write a function to calculate the", "Write a recursive function", "Write a test for",
    "Explain this code:\n```python\n", "Write a regular expression", "Write a JavaScript function",
    "Write a function that takes two strings", "Write a function to check if the given",
    "Given a list of integers", "Write a python function to find the {ordinal}", "Write a C++ program",
    "Given a string",
)  # fmt: skip

MATH = (
    "{name} has {n} {things}.", "{name} buys {n} {things}", "{name} earns ${n}",
    "A store sells {things} for ${n}", "A train travels", "{name} and {name} share {n} {things}.",
    "There are {n} {things}", "A farmer has {n}", "If {name} reads {n} pages", "{name} is {n} years old.",
    "A recipe needs", "Every day, {name}", "A box holds {n}", "{name} drives {n} miles",
    "A class of {n} students", "A rectangle has", "How many {things}", "In a school,", "Find the value of",
    "Solve for $x$:", "Simplify", "Compute", "Evaluate", "What is the greatest", "Let $f(x) =",
    "What is the sum of", "How many positive integers", "In triangle $ABC$,", "Find the area of", "If $x",
    "Find all", "What is the probability", "The equation", "Convert", "Suppose that", "A circle", "Let $a$",
    "Determine", "Factor", "Express", "What is the smallest", "The sequence", "Two dice",
    "Find the number of",
)  # fmt: skip

NAMES = (
    "Maria", "John", "Aisha", "Tom", "Elena", "Sam", "Priya", "Carlos", "Mei", "Lucas", "Nora", "Ben",
    "Fatima", "Olga", "Peter", "Jasmine", "Leo", "Hannah", "Diego", "Ruth",
)  # fmt: skip
THINGS = (
    "apples", "books", "marbles", "eggs", "pencils", "tickets", "cookies", "shirts", "flowers", "stamps",
    "coins", "chairs", "bottles", "cards", "fish", "toys", "boxes", "oranges", "candles", "bags",
)  # fmt: skip
ORDINALS = ("first", "second largest", "longest", "minimum", "maximum", "average", "n-th", "most common")
STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."

# Share of each kind of question, and of its prompts with a system prompt.
KINDS = ((GENERAL, 0.45), (CODE, 0.25), (MATH, 0.30))
SYSTEM_SHARE = 0.3
STEP_BY_STEP_SHARE = 0.6  # of the maths questions


@dataclass(frozen=True)
class Plan:
    """One text to write. Token ids of the target.

    prefix: given. suffix: follows the user turn that the target writes itself, up to where it answers; None
    if the prefix is a complete prompt. temperature: of the answer.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...] | None
    temperature: float


def self_written(target: Any, seed: int, temperatures: tuple[float, ...]) -> Iterator[Plan]:
    """Endless plans whose user turns the target writes; one of the temperatures each, in turn.

    Without a chat template the question's first words are the whole prompt.
    """
    rng = random.Random(seed)
    kinds, weights = [kind for kind, _ in KINDS], [weight for _, weight in KINDS]
    index = 0
    while True:
        kind = rng.choices(kinds, weights)[0]
        opening = _fill(rng.choice(kind), rng)
        ending = STEP_BY_STEP if kind is MATH and rng.random() < STEP_BY_STEP_SHARE else ""
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < SYSTEM_SHARE else None
        before, after = _template_around(target, opening, ending, system)
        yield Plan(
            prefix=tuple(_encode(target, before)) or (_any_id(target),),
            suffix=tuple(_encode(target, after)) if after else None,
            temperature=temperatures[index % len(temperatures)],
        )
        index += 1


def from_file(target: Any, path: Path, seed: int, temperatures: tuple[float, ...]) -> list[Plan]:
    """One plan a prompt and temperature of a prompt file (see ``read_prompts``), in an order drawn by the seed."""
    prompts = [tuple(prompt_ids(target, text)) for text in read_prompts(path)]
    plans = [Plan(prompt, None, temperature) for prompt in prompts for temperature in temperatures]
    random.Random(seed).shuffle(plans)  # a file is often sorted, and writing may stop before its end
    return plans


def mixed(given: Sequence[Plan], own: Iterator[Plan], count: int) -> Iterator[Plan]:
    """`count` plans: the given ones, as many as fit, evenly among the own ones.

    Any beginning holds both kinds in the proportion of the whole, to within one plan.
    """
    num_given, taken = min(len(given), count), 0
    for index in range(1, count + 1):
        if taken < index * num_given // count:
            yield given[taken]
            taken += 1
        else:
            yield next(own)


def read_prompts(path: Path) -> list[str]:
    """The first user turns of a file: JSON lines {"turns": [...]} or {"prompt": ...}, or plain text lines."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            prompts.append(line)
            continue
        try:
            row = json.loads(line)
            prompts.append(row["turns"][0] if "turns" in row else row["prompt"])
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise CheckpointError(
                f'{path}, line {number}: {line[:60]!r}, expected {{"turns": [...]}} or {{"prompt": ...}}'
            ) from error
    if not prompts:
        raise CheckpointError(f"{path} holds no prompts, expected one a line")
    return prompts


def prompt_ids(target: Any, text: str) -> list[int]:
    """Token ids of one user turn, by the chat template where there is one, ready for the answer."""
    if target.tokenizer.chat_template:
        return target.render_chat([{"role": "user", "content": text}])
    return _encode(target, text) or [_any_id(target)]


def _template_around(target: Any, opening: str, ending: str, system: str | None) -> tuple[str, str]:
    """The chat template's text up to the opening of a user turn, and from the turn's end to the answer."""
    tokenizer = target.tokenizer
    if not tokenizer.chat_template:
        return opening, ""
    mark = "\N{BLACK FOUR POINTED STAR}turn\N{BLACK FOUR POINTED STAR}"
    messages = [{"role": "user", "content": mark}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before, _, after = text.partition(mark)
    return before + opening, ending + after


def _fill(text: str, rng: random.Random) -> str:
    """The opening with its {slots} drawn."""
    while "{" in text:
        slot = text[text.index("{") + 1 : text.index("}")]
        values = {"topic": TOPICS, "name": NAMES, "things": THINGS, "ordinal": ORDINALS}.get(slot)
        drawn = rng.choice(values) if values else str(rng.randint(2, 240))
        text = text.replace("{" + slot + "}", drawn, 1)
    return text


def _encode(target: Any, text: str) -> list[int]:
    return target.encode(text, add_special_tokens=False)


def _any_id(target: Any) -> int:
    bos = target.tokenizer.bos_token_id
    return bos if bos is not None else target.eos_token_ids[0] if target.eos_token_ids else 0
