"""What synthetic conversations are about, and the words they begin with: our own lists.

`{topic}` stands for one of `TOPICS`, each of which fits where a noun fits. The backbone goes on behind an opening: that
says what kind of thing is asked for, and leaves open what.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError

TOPICS = """
baking bread; growing tomatoes; the moon; volcanoes; black holes; the water cycle; earthquakes; coral reefs;
honey bees; whales; dinosaurs; the human heart; sleep; vaccines; vitamins; running a marathon; learning to swim;
chess openings; the rules of football; the Olympic Games; ancient Egypt; the Roman Empire; the Silk Road;
the French Revolution; the causes of the First World War; the invention of printing; the history of money;
the steam engine; Marie Curie; Leonardo da Vinci; Shakespeare's plays; fairy tales; detective novels; haiku;
writing a short story; public speaking; job interviews; writing a cover letter; asking for a raise; remote work;
time management; keeping a diary; saving money; paying off debts; inflation; the stock market;
starting a small business; marketing a new product; customer complaints; planning a wedding; birthday parties;
moving to another city; choosing a dog; training a puppy; cats; aquariums; fixing a bicycle; changing a tire;
electric cars; trains; sailing; air travel; packing for a long trip; Japan; Brazil; Iceland; hiking in the Alps;
camping in the rain; street photography; watercolor painting; the violin; jazz; opera; learning the guitar;
folk dances; silent films; video games; board games; knitting; woodworking; restoring old furniture; houseplants;
composting; solar panels; wind power; climate change; recycling plastic; clean water; rain forests; deserts; rivers;
the weather forecast; maps; calendars; prime numbers; fractions; probability; geometry; statistics; logic puzzles;
the speed of light; magnets; batteries; atoms; chemical reactions; the periodic table; DNA; evolution; bacteria;
the brain; memory; dreams; happiness; friendship; stress; shyness; good manners; raising twins; reading to children;
homework; learning French; sign language; the alphabet; proverbs; translation; libraries; museums; newspapers;
voting; human rights; courts; taxes; insurance; first aid; allergies; healthy breakfasts; cooking rice;
pasta sauces; tea; coffee; chocolate; spices; vegetarian cooking; leftovers; computer viruses; passwords;
search engines; artificial intelligence; robots; databases; sorting algorithms; web design; open source software;
spreadsheets; mobile phones; satellites; life on Mars
"""

ABOUT = """
Tell me about {topic} and|Explain {topic} to|What should a beginner know about {topic}|
Tell me a short story about {topic}|Write a poem about {topic} with|Give me three facts about {topic}|
Give me five tips on {topic} for|Describe {topic} in|I have a question about {topic}:|When it comes to {topic}, how|
When it comes to {topic}, why|Regarding {topic}, what|Regarding {topic}, is it true that|
What do people get wrong about {topic}|Which book on {topic} would|Compare {topic} with|
I am writing an essay about {topic}.|My daughter asked me about {topic}.|Make a quiz about {topic} with|
Plan a lesson about {topic} for|Summarize the history of {topic} in|Draft an e-mail to a friend about {topic}|
Write a dialogue between two people who talk about {topic}|I know nothing about {topic}.|
I read an article about {topic} that|List the most important words about {topic}|
Why are so many people interested in {topic}|Who first|What is the role of {topic} in|
Prepare a speech about {topic} for|Is there a connection between {topic} and|
How have people's views of {topic} changed since|Suggest a title for an article about {topic} that|
Let's talk about {topic}.|Give me an argument against {topic}|Review a film about {topic}|
What would the world be like without {topic}|For a school project on {topic}, I need
"""

PLAIN = """
What is the difference between|How do I|How can I|How does|How many|Why do|Why is|Explain why|What happens when|
What are the|Who was|When did|Where can I find|Which is better,|Should I|Is it possible to|Give me a list of|
Invent a short story in which|Write a letter to|Rewrite this sentence:|Correct the grammar:|
Summarize the following text:|Translate this into simple words:|I need|I want to|I feel|My friend|Please|Suggest|
Imagine|Let's|Solve this:|If|Complete the sentence:|Name|Is this sentence
"""

CODE = """
Write a Python function that|Show me a Python class for|Write a Python script that reads|
I need a JavaScript function that|Write a Java method that|Implement a C program that|Write a C++ function that|
Write a SQL query that|Create a Bash script that|Write a regular expression that matches|Design an HTML page with|
Add a unit test for a function that|How would a Rust function look that|Write a Go function that|In Python, how do I|
In JavaScript, what is|What does this Python code print?\\n```python\\n|Fix the bug in this function:\\n```python\\ndef|
How do I sort|Explain recursion with|What is the time complexity of
"""

LANGUAGES = {
    "de": "Was ist|Wie kann ich|Warum|Erkläre mir|Schreibe einen kurzen Text über|Nenne drei|Was bedeutet|Welche",
    "fr": "Qu'est-ce que|Comment|Pourquoi|Explique-moi|Écris un court texte sur|Donne-moi trois|Que veut dire|Quel est",
    "es": "¿Qué es|¿Cómo puedo|¿Por qué|Explícame|Escribe un texto corto sobre|Dame tres|¿Qué significa|¿Cuál es",
    "pt": "O que é|Como posso|Por que|Explique|Escreva um texto curto sobre|Dê-me três|O que significa|Qual é",
    "it": "Che cos'è|Come posso|Perché|Spiegami|Scrivi un breve testo su|Dammi tre|Che cosa significa|Qual è",
    "nl": "Wat is|Hoe kan ik|Waarom|Leg uit|Schrijf een korte tekst over|Geef me drie|Wat betekent|Welke",
    "ru": "Что такое|Как мне|Почему|Объясни|Напиши короткий текст о|Назови три|Что значит|Какой",
    "zh": "什么是|我怎样才能|为什么|请解释|写一篇关于|给我三个|怎么|哪个",
    "ja": "とは何ですか。|どうすれば|なぜ|説明してください。|短い文章を書いてください。|三つ教えてください。|何が",
    "ko": "무엇이|어떻게 하면|왜|설명해 주세요.|짧은 글을 써 주세요.|세 가지를 알려 주세요.|어느",
    "hi": "क्या है|मैं कैसे|क्यों|समझाइए|एक छोटा लेख लिखिए|तीन बातें बताइए|कौन",
    "ar": "ما هو|كيف يمكنني|لماذا|اشرح لي|اكتب نصا قصيرا عن|أعطني ثلاثة|ما معنى",
}
"""Openings of questions by the codes of `language.py`."""

NEXT = """
Why|How|What about|Can you give me an example|Explain the second point|Make it shorter|And if|Is that always|
Thank you! Now|Write it as|What is the most important|Who else|Give me more|I don't understand|Say that again in|
Which of these|What else|
"""
"""Openings of later questions; the last one is empty."""

PERSONAS = """
You are a helpful assistant.|You are a patient teacher.|Answer briefly.|Answer in one short paragraph.|
Answer step by step.|You are an expert in {topic}.|Explain things as you would to a child.|
Be precise, and say what you do not know.|You write in a friendly and lively way.|
Answer with a list where that helps.|You are a librarian who likes {topic}.|Always give an example.
"""
"""System prompts that stay in the conversation."""

SECTIONS = """
the history of {topic}|how beginners get to know {topic}|common mistakes and {topic}|what experts say about {topic}|
a day in the life of somebody who works with {topic}|the future of {topic}|{topic} in daily life|
{topic} in art and books|what {topic} costs, and who pays for it|{topic} in other countries|
what children ask about {topic}|the science of {topic}|a well-known story about {topic}|
dangers of {topic}, and how to avoid them|tools and words for {topic}|why {topic} matters
"""
"""What the sections of a long text are about."""

QUESTIONS = """
According to the text above, what|According to the text, why|Summarize the text above in|Summarize the text above.|
What does the text say about|Which of the points in the text|What is the main idea of the text|
Write three questions about the text above|Write a title for the text above|Explain the last part of the text|
In the text above, who|Make a list of the main points of the text|Rewrite the beginning of the text|
What is missing in the text above
"""
"""Openings of questions about a long text."""


def entries(text: str, separator: str = "|") -> list[str]:
    """The entries of one of the lists: a line break within one is a blank, and `\\n` a line break."""
    joined = [" ".join(one.split("\n")).strip(" ") for one in text.strip("\n").split(separator)]
    return [one.replace("\\n", "\n") for one in joined]


def read_topics(source: str) -> list[str]:
    """Topics: the list above for `own`, none for `none`, else the lines of a file.

    Raises:
        UserError: there is no such file, or it holds nothing.
    """
    if source in ("own", "none"):
        return entries(TOPICS, ";") if source == "own" else []
    try:
        found = [line.strip() for line in Path(source).read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--topics {source}: cannot be read ({error}); give a file with a topic a line, own, or none"
        ) from None
    if not found:
        raise UserError(f"--topics {source}: holds no topic")
    return found
