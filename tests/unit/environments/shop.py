"""An environment of TRL's protocol that uses all of it, and reward functions that read it at its end."""

import asyncio
from typing import Any, ClassVar, Literal


class Shelf:
    """What a base class has is the environment's, too."""

    prices: ClassVar = {"tea": 3, "milk": 1}

    def look(self) -> list[dict[str, Any]]:
        """
        Look at the shelf.

        Returns:
            What is there, with a picture.
        """
        return [{"type": "text", "text": " ".join(self.prices)}, {"type": "image", "image": self}]

    @staticmethod
    def _cost(goods: list[str]) -> int:
        return sum(Shelf.prices[one] for one in goods)


class Shop(Shelf):
    def __init__(self):
        self.handle = object()  # no JSON
        self.done, self._secret = False, "s3cret"
        self.reward: float = 0.0

    def reset(self, prompt, purse: int = 9, greets: str | None = None, **kwargs) -> Any:
        self.purse, self.basket, self.columns = purse, [], sorted(kwargs)
        if greets == "list":
            return [{"type": "text", "text": f" You have {purse}."}, {"type": "image", "image": b""}]
        return f" You have {purse}." if greets == "text" else None

    async def buy(self, goods: list[str], bag: Literal["paper", "none"] = "none", times: int | None = None) -> int:
        """
        Buy something.

        Args:
            goods: What to buy.
            bag: How to carry it.
            times: How often; once without.

        Returns:
            What is left.
        """
        await asyncio.sleep(0)
        if self.done:
            raise ValueError("The shop is closed.")
        self.purse -= self._cost(goods) * (times or 1)
        self.basket += goods
        self.reward = float(len(self.basket))
        return self.purse

    def leave(self) -> None:
        """Leave the shop."""
        self.done = True

    @property
    def spent(self) -> int:
        return self._cost(self.basket)

    @property
    def broken(self) -> int:
        raise RuntimeError("never works")


class ScoredShop(Shop):
    async def get_reward(self) -> float:
        return self.reward + 0.5


def earned(environments, **kwargs) -> list[float | None]:
    return [env.reward if env.done else None for env in environments]


def thrift(completions, environments, purse, log_metric, **kwargs):
    log_metric("spent", sum(env.spent for env in environments))
    return [env.purse / had for env, had in zip(environments, purse)]


def nosy(environments, **kwargs):
    return [env.handle for env in environments]
