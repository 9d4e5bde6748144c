"""Writes train.jsonl and valid.jsonl: numbers from 1 to 999 in words, in three languages. Needs nothing but Python."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = {
    "English": (
        "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
        " eighteen nineteen",
        "twenty thirty forty fifty sixty seventy eighty ninety",
    ),
    "German": (
        "eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn"
        " achtzehn neunzehn",
        "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
    ),
    "Dutch": (
        "een twee drie vier vijf zes zeven acht negen tien elf twaalf dertien veertien vijftien zestien zeventien"
        " achttien negentien",
        "twintig dertig veertig vijftig zestig zeventig tachtig negentig",
    ),
}
JOINTS = {
    "English": ("", "", " hundred and ", "-"),
    "German": ("ein", "und", "hundert", ""),
    "Dutch": ("een", "en", "honderd", ""),
}


def in_words(number: int, language: str) -> str:
    ones, tens = (row.split() for row in WORDS[language])
    one, and_, hundred, dash = JOINTS[language]
    if number >= 100:
        hundreds, rest = divmod(number, 100)
        head = one if hundreds == 1 and language == "German" else ones[hundreds - 1]
        return (head + hundred + (in_words(rest, language) if rest else "")).removesuffix(" and ")
    if number < 20:
        return ones[number - 1]
    ten, rest = tens[number // 10 - 2], number % 10
    if not rest:
        return ten
    if language == "English":
        return f"{ten}{dash}{ones[rest - 1]}"
    return f"{one if rest == 1 else ones[rest - 1]}{and_}{ten}"


def main() -> None:
    folder = Path(__file__).parent
    for split, numbers in (("train", [n for n in range(1, 1000) if n % 5]), ("valid", range(5, 1000, 5))):
        rows = [{"source": in_words(number, language), "target": language} for number in numbers for language in WORDS]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
