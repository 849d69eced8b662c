"""Print what pip is configured for as assignments for a shell in which uv is to use the same indexes and files."""

import ast
import shlex
import subprocess
import sys

NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
}

if __name__ == "__main__":
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = {}
    for line in sorted(listed.stdout.splitlines(), key=lambda line: not line.startswith("global.")):  # others overrule
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in ("global", "install", ":env:") and option in NAMES:
            words = ast.literal_eval(value).split()
            found[NAMES[option]] = ("," if option == "find-links" else " ").join(words)
    found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # as pip chooses among indexes
    print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in found.items()))
