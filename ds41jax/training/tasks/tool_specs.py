"""The tools that are offered: some of everyday life, and any number of composed ones."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ds41jax.training.tasks.words import (
    CITIES,
    COLOURS,
    DAYS,
    LANGUAGES,
    NOUNS,
    OBJECTS,
    PLACES,
    PLAIN_WORDS,
    TOPICS,
    VERBS,
    identifier,
    invented_word,
    title,
)

Draw = Callable[[random.Random], Any]


@dataclass(frozen=True)
class Parameter:
    """A tool's parameter: possible names, JSON type, meaning, and how a value is drawn."""

    names: tuple[str, ...]
    type: str
    about: str
    draw: Draw
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """A tool of everyday life.

    Attributes:
      requests: what a user says, with a field `{0}`, `{1}`, ... for each parameter said; a request
        that leaves the last ones out is a call without them.
      result: the fields of its result.
      reply: the answer from a result, with those fields and the parameters by number.
    """

    names: tuple[str, ...]
    about: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    result: dict[str, Draw] = field(default_factory=dict)
    reply: str = ""


def _words(*names: str, about: str, draw: Draw) -> Parameter:
    return Parameter(names, "string", about, draw)


def _number(*names: str, about: str, low: int, high: int) -> Parameter:
    return Parameter(names, "integer", about, lambda rng: rng.randint(low, high))


def _enum(*names: str, about: str, choices: tuple[str, ...]) -> Parameter:
    return Parameter(names, "string", about, lambda rng: rng.choice(choices), choices)


def _time(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


def _phrase(rng: random.Random) -> str:
    words = [rng.choice(("the", "a", "my")), *rng.sample(COLOURS, 1), rng.choice(OBJECTS)]
    return " ".join([*words, "in the", rng.choice(PLACES)] if rng.random() < 0.5 else words)


_CITY = _words(
    "city", "location", "place", about="Name of the city", draw=lambda r: r.choice(CITIES)
)
_TOPIC = _words("query", "topic", "q", about="What to look for", draw=lambda r: r.choice(TOPICS))
_ROOM = _words("room", about="The room", draw=lambda r: r.choice(PLACES))
_A = _number("a", "first", "x", about="First number", low=1, high=999)
_B = _number("b", "second", "y", about="Second number", low=1, high=999)
_UNITS = ("celsius", "fahrenheit")

SPECS = (
    Spec(
        ("get_weather", "weather", "current_weather", "lookup_weather"),
        "Get the current weather in a city.",
        (_CITY, _enum("unit", "units", about="Temperature unit", choices=_UNITS)),
        ("What is the weather in {0}?", "How is the weather in {0} today?", "weather in {0}",
         "What's the weather like in {0}?", "Is it raining in {0}?", "How warm is it in {0}?",
         "Tell me the weather in {0} in {1}.", "What is the temperature in {0} in {1}?"),
        {"temperature": lambda r: r.randint(-10, 38),
         "sky": lambda r: r.choice(("sunny", "cloudy", "rainy", "windy", "foggy", "snowy"))},
        "It is {sky} in {0}, with {temperature} degrees.",
    ),
    Spec(
        ("get_time", "current_time", "local_time", "clock"),
        "Get the current time in a city.",
        (_CITY,),
        ("What time is it in {0}?", "What is the time in {0} now?", "current time in {0}",
         "Tell me the time in {0}."),
        {"time": _time},
        "It is {time} in {0}.",
    ),
    Spec(
        ("add_numbers", "add", "sum"),
        "Add two numbers.",
        (_A, _B),
        ("Add {0} and {1}.", "What is {0} plus {1}?", "Sum up {0} and {1}.", "{0} + {1}"),
        {"result": lambda r: r.randint(2, 1998)},
        "The result is {result}.",
    ),
    Spec(
        ("multiply", "multiply_numbers", "product"),
        "Multiply two numbers.",
        (_A, _B),
        ("Multiply {0} by {1}.", "What is {0} times {1}?", "{0} * {1}",
         "Compute the product of {0} and {1}."),
        {"result": lambda r: r.randint(2, 99999)},
        "The result is {result}.",
    ),
    Spec(
        ("search", "web_search", "search_web", "find_articles"),
        "Search for pages about a topic.",
        (_TOPIC, _number("limit", "max_results", "count", about="How many", low=1, high=20)),
        ("Search for {0}.", "Find something about {0}.", "Look up {0} on the web.",
         "Search for {0} and show {1} results.", "Find {1} pages about {0}."),
        {"title": title},
        'I found a page about {0}: "{title}".',
    ),
    Spec(
        ("set_alarm", "create_alarm", "alarm"),
        "Set an alarm.",
        (_words("time", "at", about="Time as HH:MM", draw=_time),
         _words("day", about="Day of the week", draw=lambda r: r.choice(DAYS))),
        ("Set an alarm for {0}.", "Wake me up at {0}.", "Set an alarm for {0} on {1}.",
         "alarm at {0}", "Wake me at {0} on {1}."),
        {"status": lambda r: r.choice(("set", "ok"))},
        "The alarm is set for {0}.",
    ),
    Spec(
        ("set_timer", "start_timer", "timer"),
        "Start a timer.",
        (_number("minutes", "duration", about="Minutes", low=1, high=120),),
        ("Set a timer for {0} minutes.", "Start a {0} minute timer.", "timer {0} minutes",
         "Count down {0} minutes for me."),
        {"status": lambda r: r.choice(("running", "started"))},
        "The timer of {0} minutes is running.",
    ),
    Spec(
        ("translate", "translate_text"),
        "Translate a text into another language.",
        (_words("text", about="The text", draw=_phrase),
         _words("language", "target", "to", about="Target language",
                draw=lambda r: r.choice(LANGUAGES))),
        ('Translate "{0}" into {1}.', 'How do you say "{0}" in {1}?', "Translate to {1}: {0}"),
        {"translation": lambda r: " ".join(r.sample(PLAIN_WORDS, 2))},
        'In {1} it is "{translation}".',
    ),
    Spec(
        ("turn_on_light", "light_on", "switch_on_light"),
        "Turn on the light of a room.",
        (_ROOM, _number("brightness", "level", about="Percent", low=1, high=100)),
        ("Turn on the light in the {0}.", "Switch on the light in the {0}.", "Light in the {0} on.",
         "Turn on the light in the {0} at {1} percent."),
        {"status": lambda r: "on"},
        "The light in the {0} is on.",
    ),
    Spec(
        ("set_temperature", "thermostat", "heat_room"),
        "Set the temperature of a room.",
        (_ROOM, _number("degrees", "temperature", about="Degrees", low=10, high=30)),
        ("Set the temperature in the {0} to {1} degrees.", "Heat the {0} to {1} degrees.",
         "Make the {0} {1} degrees warm."),
        {"status": lambda r: "ok"},
        "The {0} is set to {1} degrees.",
    ),
    Spec(
        ("convert_units", "convert", "unit_converter"),
        "Convert a length.",
        (_number("value", "amount", about="The number", low=1, high=500),
         _enum("from_unit", "source", about="Unit", choices=("meters", "feet", "miles", "inches")),
         _enum("to_unit", "target", about="Unit", choices=("kilometers", "yards", "centimeters"))),
        ("Convert {0} {1} to {2}.", "How many {2} are {0} {1}?", "{0} {1} in {2}"),
        {"result": lambda r: r.randint(1, 9999) / 10},
        "{0} {1} are {result} {2}.",
    ),
    Spec(
        ("read_file", "open_file", "show_file"),
        "Read a text file.",
        (_words("path", "file", "filename", about="Path of the file",
                draw=lambda r: f"{r.choice(NOUNS)}s/{r.choice(PLAIN_WORDS)}.txt"),),
        ("Read the file {0}.", "Show me {0}.", "What is in {0}?", "Open {0}."),
        {"text": lambda r: " ".join(r.sample(PLAIN_WORDS, 3))},
        "{0} says: {text}",
    ),
    Spec(
        ("list_files", "list_folder", "ls"),
        "List the files of a folder.",
        (_words("folder", "path", "directory", about="Path of the folder",
                draw=lambda r: f"/{r.choice(PLAIN_WORDS)}/{r.choice(NOUNS)}s"),),
        ("List the files in {0}.", "Which files are in {0}?", "Show the folder {0}."),
        {"count": lambda r: r.randint(0, 90)},
        "There are {count} files in {0}.",
    ),
    Spec(
        ("convert_currency", "exchange", "currency"),
        "Convert an amount of money.",
        (_number("amount", "value", about="Amount", low=1, high=5000),
         _enum("from", "source", about="Currency", choices=("USD", "EUR", "GBP")),
         _enum("to", "target", about="Currency", choices=("JPY", "CHF", "SEK"))),
        ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "Change {0} {1} into {2}."),
        {"result": lambda r: r.randint(1, 99999)},
        "{0} {1} are {result} {2}.",
    ),
    Spec(
        ("play_music", "play", "start_playlist"),
        "Play a piece of music.",
        (_words("title", "song", "name", about="Title", draw=title),),
        ('Play "{0}".', "Play the song {0}.", "I want to hear {0}.", "Put on {0}."),
        {"status": lambda r: "playing"},
        "Now playing {0}.",
    ),
    Spec(
        ("add_to_list", "shopping_list", "add_item"),
        "Put an item on the shopping list.",
        (_words("item", "product", about="The item", draw=lambda r: r.choice(OBJECTS)),
         _number("quantity", "amount", about="How many", low=2, high=12)),
        ("Put {0} on my shopping list.", "Add {0} to the shopping list.",
         "Add {1} of {0} to the shopping list."),
        {"items": lambda r: r.randint(1, 20)},
        "{0} is on the list, which has {items} items now.",
    ),
    Spec(
        ("track_package", "parcel_status", "track"),
        "Find out where a parcel is.",
        (_words("number", "tracking_id", "code", about="Tracking number", draw=identifier),),
        ("Where is my parcel {0}?", "Track the package {0}.", "What about shipment {0}?"),
        {"place": lambda r: r.choice(CITIES)},
        "The parcel {0} is in {place}.",
    ),
    Spec(
        ("find_train", "train_times", "search_trains"),
        "Find a train between two cities.",
        (_words("start", "from_city", "origin", about="City of departure",
                draw=lambda r: r.choice(CITIES)),
         _words("end", "to_city", "destination", about="City of arrival",
                draw=lambda r: r.choice(CITIES))),
        ("Find a train from {0} to {1}.", "When is the next train from {0} to {1}?",
         "I want to go from {0} to {1} by train.", "trains {0} to {1}"),
        {"departure": _time},
        "The next train from {0} to {1} leaves at {departure}.",
    ),
    Spec(
        ("random_number", "roll", "pick_number"),
        "Draw a random number.",
        (_number("low", "min", "minimum", about="Least number", low=0, high=50),
         _number("high", "max", "maximum", about="Greatest number", low=51, high=999)),
        ("Give me a random number between {0} and {1}.", "Pick a number from {0} to {1}.",
         "Random number, {0} to {1}."),
        {"number": lambda r: r.randint(0, 999)},
        "The number is {number}.",
    ),
)  # fmt: skip

# A composed tool's parameters: how each is said behind the noun.
COMPOSED = (
    (_words("id", "reference", "key", about="Identifier", draw=identifier),
     ("with the id {}", "with id {}", "{}")),
    (_words("name", "label", about="Name", draw=title), ("named {}", "called {}")),
    (_words("city", "place", about="City", draw=lambda r: r.choice(CITIES)), ("in {}", "at {}")),
    (_words("colour", "color", about="Colour", draw=lambda r: r.choice(COLOURS)),
     ("with the colour {}", "in {}")),
    (_number("count", "number", "amount", about="How many times", low=1, high=99),
     ("{} times",)),
    (Parameter(("weight", "kilograms"), "number", "Kilograms", lambda r: r.randint(1, 400) / 10),
     ("weighing {} kg", "of {} kilograms")),
    (Parameter(("notify", "notification"), "boolean", "Send a notification", lambda r: True),
     ("and notify me", "with a notification")),
    (_enum("priority", about="Urgency", choices=("low", "medium", "high")),
     ("with {} priority", "at {} priority")),
    (_words("day", about="Day of the week", draw=lambda r: r.choice(DAYS)), ("on {}",)),
    (_words("room", "location", about="Where", draw=lambda r: r.choice(PLACES)), ("in the {}",)),
)  # fmt: skip


def composed_words(rng: random.Random) -> tuple[str, str]:
    """A verb and a noun for a composed tool."""
    return rng.choice(VERBS), rng.choice(NOUNS)


def odd_parameter(rng: random.Random) -> tuple[Parameter, tuple[str, ...]]:
    """A parameter whose name is not known beforehand, so that names are copied, not remembered."""
    name = rng.choice((invented_word(rng), "_".join(rng.sample(PLAIN_WORDS, rng.randint(1, 2)))))
    word = name.replace("_", " ")
    said = (f"with {word} {{}}", f"{word}: {{}}", f"at {word} {{}}")
    if rng.random() < 0.4:
        return _number(name, about=f"The {word}", low=0, high=9999), said
    return _words(name, about=f"The {word}", draw=rng.choice((identifier, invented_word))), said
