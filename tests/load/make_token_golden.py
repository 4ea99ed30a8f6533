"""Makes tests/golden/smollm2_tokens.json with llama.cpp's tokenizer: an oracle that shares no code
with ours. Run by hand, never by the tests:

    pip install xllamacpp    # in an environment of its own
    python tests/load/make_token_golden.py PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import urllib.request
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "smollm2_tokens.json"


def main(gguf: str) -> None:
    """Start llama.cpp's server in this process, ask it for every snippet, write the file."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    texts = importlib.import_module("token_snippets").snippets()
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup = gguf, 256, False
    address = xllamacpp.Server(params).listening_address
    tokens = []
    for text in texts:
        body = {"content": text, "add_special": False, "parse_special": True}
        request = urllib.request.Request(
            address + "/tokenize", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            tokens.append(json.load(reply)["tokens"])
    head = {
        "what": "ids of tests/load/token_snippets.py by llama.cpp's own tokenizer on "
        f"{Path(gguf).name} (add_special false, parse_special true)",
        "made_by": "tests/load/make_token_golden.py",
        "with": f"xllamacpp {importlib.metadata.version('xllamacpp')}",
    }
    rows = ",\n".join("  " + json.dumps(row, separators=(",", ":")) for row in tokens)
    text = json.dumps(head, indent=1)[:-2] + f',\n "tokens": [\n{rows}\n ]\n}}\n'
    GOLDEN.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
