"""Talk without a picture: greetings, questions about the model, and what it cannot tell."""

from __future__ import annotations

import random

from demo_more import describe_wording
from demo_questions import pick
from demo_scenes import draw_scene
from demo_text import capital_name, frequent_word, prose
from demo_words import NO_PICTURE, REFUSAL, Turn, casual

HELLO = "Hello! Ask me about a picture or a video."
MODEL = "I am the vlm-serve demo model."
ABLE = "I answer questions about simple pictures and videos."
WELCOME = "You are welcome."
FINE = "I am fine. Ask me about a picture or a video."
BYE = "Goodbye."

GREETINGS = ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Good day", "Greetings", "Hiya")
CALLED = (
    "",
    "",
    "",
    ", nice to see you",
    ", good to meet you",
    " again",
    " there",
    " model",
    " assistant",
    " everybody",
    " bot",
    " friend",
)
ASKED = (
    (MODEL, "Who are you?", "What are you?", "What is your name?", "Which model are you?"),
    (MODEL, "Who are you", "What model is this?", "Tell me about yourself.", "Are you an AI?"),
    (MODEL, "Introduce yourself.", "Please introduce yourself.", "What's your name?"),
    (ABLE, "What can you do?", "What do you do?", "How can you help me?", "What can I ask you?"),
    (ABLE, "Help", "Can you help me?", "What are you good at?", "What can you help with?"),
    (ABLE, "What are your capabilities?", "What can I do with you?", "How do you work?"),
    (MODEL, "Say who you are.", "Tell me your name.", "Please tell me what you are."),
    (MODEL, "What kind of model are you?", "Who am I talking to?", "Do you have a name?"),
    (ABLE, "Tell me what you can do.", "What are you able to do?", "How can you help?"),
    (WELCOME, "Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!", "Great, thanks!"),
    (WELCOME, "Thanks, that was helpful!", "Thank you, that is right.", "Thanks, well done!"),
    (WELCOME, "Thank you so much", "Thanks so much.", "Nice, thank you.", "Okay, thanks"),
    (FINE, "How are you?", "How are you doing?", "How do you do?", "How is it going?"),
    (FINE, "How are you feeling?", "How are things?", "Are you well?", "How are you now?"),
    (BYE, "Bye!", "Goodbye!", "See you later.", "Good night!", "Bye bye"),
    (BYE, "See you!", "Goodbye, model.", "Bye, see you.", "Farewell", "Good bye!"),
    (HELLO, "Say hello.", "Say hi.", "Test", "Is anybody there?", "Are you there?", "Ping"),
)


def greeting(rng: random.Random) -> Turn:
    """Return a greeting and its answer."""
    word, called = rng.choice(GREETINGS), rng.choice(CALLED)
    follow = rng.choice(("", "", "", " How are you?", " Can you help me?", " What can you do?"))
    mark = rng.choice(("!", "!", ".", ",", "")) if not follow else rng.choice(("!", ".", ","))
    said = (word if rng.random() < 0.8 else word.lower()) + called + mark
    if "What can" in follow:
        return Turn("small talk", said + follow, ABLE)
    return Turn("small talk", said + follow, HELLO)


def about_model(rng: random.Random) -> Turn:
    """Return a question about the model itself, thanks or a farewell."""
    answer, *questions = rng.choice(ASKED)
    question = casual(rng, rng.choice(questions))
    if rng.random() < 0.15 and answer in (MODEL, ABLE):
        question = f"{rng.choice(GREETINGS)}{rng.choice((', ', '! ', '. '))}{question}"
    return Turn("small talk", question, answer)


def off_topic(rng: random.Random) -> Turn:
    """Return a request that only a larger model could serve."""
    what, name = prose(rng, rng.randint(1, 6))[:-1].lower(), capital_name(rng)
    asks = (
        f"What is {what}?",
        f"Explain {what}.",
        f"Write a poem about {what}.",
        f"Write a story about {name}.",
        f"Who is {name}?",
        f"What is the capital of {name}?",
        f"Why is {what}?",
        f"How do I {what}?",
        f"Translate {what}.",
        f"Write a function that {what}.",
        f"Tell me a joke about {frequent_word(rng)}.",
        f"Summarize this: {prose(rng, rng.randint(5, 30))}",
        f"Should I {what}?",
        f"When did {name} {what}?",
    )
    return Turn("refusal", casual(rng, rng.choice(asks)), REFUSAL)


def unseen(rng: random.Random) -> Turn:
    """Return a question about a picture that is not there."""
    question = pick(rng, draw_scene(rng, "train")).question
    if rng.random() < 0.3:
        question = casual(rng, describe_wording(rng))
    return Turn("no picture", question, NO_PICTURE)


def copy(rng: random.Random) -> Turn:
    """Return a request to repeat words."""
    said = " ".join(
        rng.choice((capital_name(rng), frequent_word(rng))) for _ in range(rng.randint(1, 5))
    )
    said += rng.choice(("", ".", "!"))
    asks = rng.choice(("Say: {}", "Repeat: {}", "Repeat after me: {}", "Say exactly this: {}"))
    return Turn("copy", asks.format(said), said)


def talk_turn(rng: random.Random) -> Turn:
    """Return any of these."""
    kinds = (greeting, about_model, off_topic, unseen, copy)
    return rng.choices(kinds, (3, 3, 2, 2.5, 1.5))[0](rng)
