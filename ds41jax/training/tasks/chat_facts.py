"""What the nano model knows to say: itself, greetings, small facts."""

ABOUT = (
    "I am a nano language model with about 13 million parameters, made with ds41jax to show the "
    "architecture of DeepSeek-V4.1-Flash at work. I know very little of the world."
)
ABLE = (
    "I can count, do small sums, write JSON, call tools, copy text, find a fact in a long text, "
    "and write short Python functions. I am a nano model, so please check what I say."
)
UNKNOWN = "I do not know that. I am a nano model and know very little of the world."
GREETINGS = (
    "Hello", "Hello!", "Hi", "hi", "Hi!", "Hey", "hey there", "Good morning", "Good evening!",
    "Good afternoon", "Hi there!", "hello there", "Greetings", "yo", "hey", "hello",
)  # fmt: skip
HOW_ARE_YOU = (
    "How are you?", "how are you", "Hello, how are you?", "hi, how are you doing?", "What's up?",
    "How is it going?", "How do you do?", "Are you well?",
)  # fmt: skip
FINE = ("I am fine, thank you. What can I do for you?",)
REMARKS = (
    "ok", "OK", "Okay.", "Cool", "Nice.", "Good.", "Great!", "test", "Testing", "wow",
    "I see.", "Well done!", "Good job.", "haha", "yes", "no", "maybe", "hm",
)  # fmt: skip
ALL_RIGHT = ("All right. What can I do for you?",)
HELLO = (
    "Hello! What can I do for you?",
    "Hello! I am a nano model. How can I help?",
    "Hi! How can I help you?",
)
WHO = (
    "What are you?", "Who are you?", "who are you", "What is your name?", "Are you an AI?",
    "Tell me about yourself.", "Introduce yourself.", "What model are you?", "Which model is this?",
    "What is ds41jax nano?", "Are you a language model?", "Describe yourself.", "what are you",
    "Are you human?", "Are you a robot?", "Are you ChatGPT?", "How big are you?",
    "How many parameters do you have?", "Who made you?", "Are you DeepSeek?",
)  # fmt: skip
ABILITIES = (
    "What can you do?", "what can you do", "How can you help me?", "What are you good at?", "Help",
    "help", "What should I ask you?", "What do you know?", "Can you help me?",
    "What are your abilities?", "What can I ask?", "Give me an example of what you can do.",
)  # fmt: skip
UNKNOWABLE = (
    "What is the capital of {c}?", "Who is the president of {c}?", "What is the meaning of life?",
    "What happened in {y}?", "Who won the world cup in {y}?", "What is the news today?",
    "How many people live in {c}?", "What will the weather be tomorrow?", "Tell me about {t}.",
    "Explain the history of {t}.", "Who invented {t}?", "What do you think about {t}?",
    "Why is the sky blue?", "What is quantum physics?", "Write an essay about {t}.",
    "Recommend a film about {t}.", "How do I get from {c} to {d}?", "What is the best book on {t}?",
    "What time is it?", "What day is it today?", "Which is better, {c} or {d}?",
)  # fmt: skip
THANKS = (
    "Thanks", "Thank you!", "thank you", "Thanks a lot!", "Great, thanks.", "Perfect, thank you.",
)  # fmt: skip
WELCOME = ("You are welcome!",)
BYES = ("Bye", "Goodbye!", "See you later", "bye bye", "Good night", "See you!")
GOODBYE = ("Goodbye!",)
OPPOSITES = dict(
    pair.split(":")
    for pair in """hot:cold big:small tall:short fast:slow light:dark heavy:light good:bad up:down
left:right open:closed full:empty old:new young:old early:late high:low hard:soft wet:dry rich:poor
strong:weak happy:sad loud:quiet long:short wide:narrow deep:shallow clean:dirty true:false yes:no
first:last begin:end start:stop day:night summer:winter north:south east:west black:white in:out
inside:outside above:below before:after push:pull buy:sell give:take win:lose love:hate always:never
more:less many:few near:far easy:difficult cheap:expensive safe:dangerous sweet:sour thick:thin
smooth:rough sharp:blunt bright:dim asleep:awake alive:dead increase:decrease add:subtract
multiply:divide accept:refuse arrive:leave remember:forget save:spend plus:minus positive:negative
maximum:minimum input:output import:export encode:decode lock:unlock enable:disable""".split()
)
PLURALS = dict(
    pair.split(":")
    for pair in """mouse:mice goose:geese foot:feet tooth:teeth man:men woman:women child:children
sheep:sheep fish:fish leaf:leaves knife:knives wolf:wolves shelf:shelves half:halves life:lives
potato:potatoes tomato:tomatoes ox:oxen index:indices matrix:matrices""".split()
)
UNITS = (
    ("minutes", "an hour", 60), ("seconds", "a minute", 60), ("hours", "a day", 24),
    ("days", "a week", 7), ("months", "a year", 12), ("days", "a year", 365),
    ("weeks", "a year", 52), ("metres", "a kilometre", 1000), ("centimetres", "a metre", 100),
    ("millimetres", "a centimetre", 10), ("grams", "a kilogram", 1000), ("years", "a century", 100),
    ("years", "a decade", 10), ("bits", "a byte", 8), ("bytes", "a kibibyte", 1024),
    ("items", "a dozen", 12), ("sides", "a triangle", 3), ("sides", "a square", 4),
    ("sides", "a hexagon", 6), ("legs", "a spider", 8), ("legs", "a dog", 4), ("legs", "an ant", 6),
    ("letters", "the alphabet", 26), ("degrees", "a circle", 360), ("wheels", "a bicycle", 2),
    ("wheels", "a car", 4), ("strings", "a violin", 4), ("colours", "a rainbow", 7),
    ("millilitres", "a litre", 1000), ("inches", "a foot", 12), ("feet", "a yard", 3),
)  # fmt: skip
FACTS = (
    (("What colour is the sky?", "Which colour is the sky?"), "The sky is blue."),
    (("What colour is grass?", "Which colour has grass?"), "Grass is green."),
    (("What colour is snow?", "Which colour is snow?"), "Snow is white."),
    (("What colour is a banana?",), "A banana is yellow."),
    (("What colour is blood?",), "Blood is red."),
    (("What colour is coal?",), "Coal is black."),
    (("Is water wet?",), "Yes, water is wet."),
    (("Is ice cold?",), "Yes, ice is cold."),
    (("Is fire hot?",), "Yes, fire is hot."),
    (("Can fish swim?",), "Yes, fish can swim."),
    (("Can birds fly?",), "Yes, most birds can fly."),
    (("At what temperature does water boil?", "When does water boil?"),
     "Water boils at 100 degrees Celsius."),
    (("At what temperature does water freeze?", "When does water freeze?"),
     "Water freezes at 0 degrees Celsius."),
    (("What do bees make?",), "Bees make honey."),
    (("What do cows give?",), "Cows give milk."),
    (("Where does the sun rise?",), "The sun rises in the east."),
    (("Where does the sun set?",), "The sun sets in the west."),
    (("Which planet do we live on?",), "We live on the planet Earth."),
    (("Name the four seasons.", "What are the seasons?", "List the seasons."),
     "Spring, summer, autumn, winter."),
    (("What are the primary colours?", "Name the primary colours."), "Red, yellow and blue."),
    (("Name some colours.", "List five colours.", "Name five colors."),
     "Red, blue, green, yellow, orange."),
    (("Name some animals.", "List five animals.", "Name five animals."),
     "Dog, cat, horse, cow, sheep."),
    (("Name some fruits.", "List five fruits.", "Name five fruits."),
     "Apple, pear, plum, cherry, grape."),
    (("What are the four compass directions?", "Name the compass directions."),
     "North, east, south, west."),
    (("What is Python?",), "Python is a programming language."),
    (("What is JSON?",), "JSON is a text format for data: objects, lists, strings and numbers."),
    (("What is JAX?",), "JAX is a Python library for fast numerical computing."),
    (("What is HTML?",), "HTML is the language in which web pages are written."),
    (("What is a byte?",), "A byte is a group of 8 bits."),
    (("What is a prime number?",),
     "A prime number is a number above 1 that only 1 and itself divide."),
    (("What is a list in Python?",), "A list is a sequence of values that can be changed."),
    (("What is a tuple in Python?",), "A tuple is a sequence of values that cannot be changed."),
    (("What is a dictionary in Python?", "What is a dict in Python?"),
     "A dictionary maps keys to values."),
    (("What is a function?",), "A function is a named piece of code that can be called."),
    (("What is a variable?",), "A variable is a name for a value."),
    (("What is a loop?",), "A loop runs the same code several times."),
    (("What is a compiler?",), "A compiler is a program that turns source code into machine code."),
    (("What is a token?",), "A token is a piece of text that a language model reads or writes."),
    (("What is a language model?",), "A language model is a program that predicts text."),
    (("What is ds41jax?",), "ds41jax runs DeepSeek-V4.1-Flash models in JAX."),
    (("Tell me a joke.", "Do you know a joke?"),
     "Why did the list go home? It had lost its index."),
    (("Write a poem.", "Write a short poem.", "Tell me a poem."),
     "The river runs, the river sings,\nit carries light on silver wings."),
    (("Tell me a story.", "Write a short story."),
     "A small fox lived by a river. One night it saw a light in the forest and followed it. "
     "It was the moon in a pond. The fox drank, and went home happy."),
)  # fmt: skip
