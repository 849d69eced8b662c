"""The language of a text, as the benchmark detects it, but the same every time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

_CODES = """
    af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro ru
    sk sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw
"""
LANGUAGES = frozenset(_CODES.split())  # those that langdetect knows
_SEED = 0


def is_language(text: str, language: str) -> bool:
    """Whether the text is in the language of this code; True where none can be told, which is the official rule.

    langdetect samples the text; here its generator always starts from the same seed, so that a response is graded
    alike every time. It reads the first 10,000 characters.

    >>> is_language("Das ist ein deutscher Satz.", "de"), is_language("Das ist ein deutscher Satz.", "en")
    (True, False)
    >>> is_language("12345", "de")
    True
    """
    from langdetect.lang_detect_exception import LangDetectException

    detector = _factory().create()
    detector.append(text)
    try:
        return detector.detect() == language
    except LangDetectException:  # no letters that it knows
        return True


@lru_cache(maxsize=1)
def _factory() -> Any:
    """A factory of our own: the package's own one belongs to whoever else uses it, seed and all."""
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.set_seed(_SEED)
    return factory
