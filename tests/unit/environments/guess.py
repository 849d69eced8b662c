"""An environment as users of TRL write them: a word is guessed, and told is which letters are in place."""

import random


class Guess:
    def __init__(self):
        self.word = None

    def reset(self, **kwargs) -> str | None:
        self.word = kwargs.get("word") or random.choice(["river", "stone"])
        self.guesses = []
        self.done = False
        return f"Guess a word of {len(self.word)} letters."

    def guess(self, word: str) -> str:
        """
        Guess the word.

        Args:
            word: The guess, in lower case.

        Returns:
            The letters that stand where they should; a dot for every other.
        """
        if self.done:
            raise ValueError("Game over.")
        if len(word) != len(self.word):
            raise ValueError(f"The word has {len(self.word)} letters, yours has {len(word)}.")
        self.guesses.append(word)
        self.done = word == self.word
        return self._compare(word)

    async def hint(self, position: int = 0) -> str:
        """
        Ask for a letter.

        Args:
            position: Of the letter, from 0.

        Returns:
            The letter.
        """
        return self.word[position]

    def get_reward(self) -> float:
        return 1.0 / len(self.guesses) if self.done else 0.0

    def _compare(self, word):
        return "".join(letter if letter == right else "." for letter, right in zip(word, self.word))
