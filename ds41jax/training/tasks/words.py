"""Words that requests are made of: things and places, never people."""

import random

COLOURS = "red blue green yellow black white orange purple brown grey pink silver golden".split()
ADJECTIVES = """old new small large quiet bright dark cold warm heavy light long short round narrow
wide hidden upper lower left right eastern western northern southern first second third main spare
wooden iron glass paper plastic rusty shiny soft hard dry wet""".split()
ANIMALS = """cat dog horse cow sheep goat pig duck goose hen rabbit mouse fox wolf bear deer lion
tiger elephant monkey eagle owl crow frog snake turtle fish shark whale bee ant spider""".split()
FRUITS = """apple pear plum cherry grape lemon orange banana peach melon mango kiwi fig
lime berry apricot""".split()
OBJECTS = """lamp chair table clock kettle mirror basket bottle candle hammer ladder pencil notebook
ruler bucket blanket pillow camera radio speaker monitor keyboard printer cable battery helmet
jacket boots gloves scarf umbrella backpack bicycle tent rope knife spoon bowl plate cup pan oven
fridge sofa shelf carpet curtain drill saw brush paint brick tile pipe valve pump engine wheel
mirror lantern telescope compass map ticket stamp envelope folder stapler""".split()
PLACES = """vault cabinet warehouse tower station library garden harbour bridge cellar attic
workshop laboratory office kitchen hangar depot archive gallery museum market mill barn dock
locker server router gate tunnel room box chest drawer safe garage""".split()
CITIES = """Paris London Berlin Madrid Rome Vienna Lisbon Dublin Oslo Stockholm Helsinki Copenhagen
Warsaw Prague Budapest Athens Brussels Amsterdam Zurich Geneva Munich Hamburg Milan Naples Turin
Lyon Nice Porto Seville Valencia Krakow Riga Vilnius Tallinn Sofia Bucharest Belgrade Zagreb Cairo
Tunis Lagos Nairobi Dakar Accra Tokyo Osaka Kyoto Seoul Beijing Shanghai Hanoi Bangkok Jakarta
Manila Delhi Mumbai Karachi Dubai Doha Toronto Montreal Vancouver Chicago Boston Denver Seattle
Houston Dallas Miami Lima Quito Bogota Santiago Sydney Melbourne Perth Auckland""".split()
LANGUAGES = """English French German Spanish Italian Portuguese Dutch Swedish Polish Greek Turkish
Arabic Hindi Japanese Korean Chinese Finnish Danish""".split()
TOPICS = """weather history music cooking gardening cycling painting chess trains ships planets
volcanoes rivers forests maps bridges clocks coffee tea bread cheese sailing hiking photography
astronomy robotics batteries compilers databases networks sorting hashing encryption""".split()
VERBS = """open close start stop move copy check update remove create send print clean paint repair
lock unlock rename reset inspect measure count fetch store archive pack label scan test""".split()
NOUNS = """report invoice order file folder message alarm timer device sensor door window light
camera account record note reminder event meeting booking shipment parcel package project task
backup job queue table image page document list recipe playlist song article""".split()
PLAIN_WORDS = """river stone cloud tree house road window water fire wind field mountain summer
winter morning evening bread silver paper music island forest valley ocean bridge garden light
shadow circle square copper velvet marble thunder harvest orchard meadow lantern anchor canyon
desert glacier pebble ribbon saddle timber walnut willow zenith""".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """January February March April May June July August September October November
December""".split()
_SYLLABLES = """ba be bi bo bu da de di do du fa fe fi fo ga go gu ka ke ki ko ku la le li lo lu ma
me mi mo mu na ne ni no nu pa pe pi po ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo za
ze zi zo xa or an el in um ar is on""".split()
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def invented_word(rng: random.Random) -> str:
    """A word that does not exist, so that it can only be copied."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4)))


def identifier(rng: random.Random) -> str:
    """A reference such as `k7f-29ab`, `QX-4821`, `item_52`, `velora` or `30717`."""
    form = rng.randrange(6)
    letters = "".join(rng.choice(_LETTERS) for _ in range(rng.randint(1, 3)))
    number = str(rng.randint(10, 99999))
    if form == 0:
        return f"{letters.upper()}-{number}"
    if form == 1:
        return letters + number
    if form == 2:
        return f"{rng.choice(NOUNS)}_{rng.randint(1, 999)}"
    if form == 3:
        return invented_word(rng)
    if form == 4:
        return "".join(rng.choice(_LETTERS + "0123456789") for _ in range(rng.randint(4, 8)))
    return number


def title(rng: random.Random) -> str:
    """Two or three words in capitals, such as a product's name."""
    words = [rng.choice(ADJECTIVES), rng.choice(OBJECTS + PLACES + ANIMALS)]
    if rng.random() < 0.3:
        words.insert(0, rng.choice(COLOURS))
    if rng.random() < 0.15:
        words[0] = invented_word(rng)
    return " ".join(words).title()


def plural(noun: str) -> str:
    """English plural of a regular noun."""
    if noun.endswith(("s", "sh", "ch", "x")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def article(word: str) -> str:
    """The word behind "a" or "an"."""
    return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"
