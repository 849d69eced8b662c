"""Real OpenEnv servers, for a Python that has OpenEnv: ``openenv_server.py KIND=PORT ...``, one session each at most.

``guess`` has one type of action, ``tower`` a union of two, ``notes`` lists its tools.
"""

import asyncio
import random
import sys
from typing import Annotated, Any, Literal, Union


def environments() -> dict[str, tuple]:
    from fastmcp import FastMCP
    from openenv.core.env_server import Action, Environment, Observation, State
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from pydantic import Field, RootModel

    class GuessNumberAction(Action):
        """Guess the number."""

        number: int = Field(description="What it may be.", ge=0)

    class Said(Observation):
        text: str = ""

    class Guess(Environment):
        def reset(self, seed: int | None = None, ground_truth: str = "7") -> Said:
            self.number, self.left = int(ground_truth), 3
            return Said(text=f" It lies between 0 and {90 + random.Random(seed).randrange(10)}.")

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Said:
            if action.number == 13:
                raise ValueError("unlucky\nnumber")
            self.left -= 1
            is_right = action.number == self.number
            text = "right" if is_right else "higher" if action.number < self.number else "lower"
            return Said(text=text, reward=1.0 if is_right else -0.25, done=is_right or not self.left)

        @property
        def state(self) -> State:
            return State()

    class GoUpAction(Action):
        """Go up."""

        kind: Literal["up"] = "up"
        steps: int = 1

    class SayAction(Action):
        kind: Literal["say"] = "say"
        text: str

    class AnyAction(RootModel):
        root: Annotated[Union[GoUpAction, SayAction], Field(discriminator="kind")]  # noqa: UP007

    class Seen(Observation):
        height: int
        heading: str | None = None

    class Tower(Environment):
        def reset(self, seed: int | None = None, **row: Any) -> Observation:
            self.height = 0
            return Observation(metadata={"columns": sorted(row)})

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Seen:
            self.height += getattr(action.root, "steps", 0)
            return Seen(height=self.height, said=getattr(action.root, "text", None), reward=self.height)

        @property
        def state(self) -> State:
            return State()

    class Notes(MCPEnvironment):
        def __init__(self) -> None:
            server, notes = FastMCP("notes"), list[str]()

            @server.tool
            def add_note(text: str, times: int = 1) -> str:
                """Add a note, and read all."""
                notes.extend([text] * times)
                return ", ".join(notes)

            @server.tool
            def fail(text: str) -> str:
                """Fail."""
                raise ValueError(text)

            super().__init__(server)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
            return Observation()

        def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
            return Observation()

        @property
        def state(self) -> State:
            return State()

    return {
        "guess": (Guess, GuessNumberAction, Said),
        "tower": (Tower, AnyAction, Seen),
        "notes": (Notes, CallToolAction, CallToolObservation),
    }


async def serve(ports: dict[str, int]) -> None:
    import uvicorn
    from openenv.core.env_server import create_app

    made = environments()
    configs = [uvicorn.Config(create_app(*made[kind]), port=port, log_level="error") for kind, port in ports.items()]
    await asyncio.gather(*(uvicorn.Server(config).serve() for config in configs))


if __name__ == "__main__":
    asyncio.run(serve({kind: int(port) for kind, _, port in (one.partition("=") for one in sys.argv[1:])}))
