"""One page of Prometheus text from several engines and an ingress.

With one engine the samples stand as they are. With several each sample says which engine, or which
ingress, it is of: an answer may come from any ingress, and unnamed counters would jump between it
and the next. Knows the text format; knows no metric.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from serve_app.engine_link import EngineLink
from serve_app.engine_links import EngineLinks
from serve_app.protocol.errors import ApiError


async def metrics_of(links: EngineLinks, own: str) -> str:
    """The page; `own`: the ingress's text. Engines that do not answer are left out."""
    texts = await asyncio.gather(*(_text(link) for link in links.all))
    if len(links.all) == 1:
        return texts[0] + own
    engines = {
        link.attached.engine: text
        for link, text in zip(links.all, texts, strict=True)
        if text and link.attached is not None
    }
    return merged("engine", engines) + merged("ingress", {links.home.client: own})


def merged(label: str, texts: Mapping[str, str]) -> str:
    """Texts with the same families as one, each sample labelled with the name of its text."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for name, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, f'{label}="{name}"'))
    lines = [line for family in heads for line in (*heads[family], *samples.get(family, ()))]
    return "".join(f"{line}\n" for line in lines)


def _labelled(sample: str, pair: str) -> str:
    """The label in front of those that are there."""
    name, brace, rest = sample.partition("{")
    if brace:
        return f"{name}{{{pair},{rest}"
    name, value = sample.split(" ", 1)
    return f"{name}{{{pair}}} {value}"


async def _text(link: EngineLink) -> str:
    try:
        return await link.metrics_text()
    except ApiError:
        return ""
