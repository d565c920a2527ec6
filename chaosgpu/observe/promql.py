"""The series selectors in a query. A whole parser is not needed to ask how old the samples are that a query reads.

https://prometheus.io/docs/prometheus/latest/querying/basics/ and, for its words, MetricsQL of VictoriaMetrics.
"""

import re

_TOKEN = re.compile(
    r"""(?P<skipped>\s+|\#[^\n]*)
    |(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`)
    |(?P<number>(?:\d|\.\d)[\w.]*(?:(?<=[eE])[+-]\d+)?)
    |(?P<name>[A-Za-z_:][\w:.]*)
    |(?P<sign>.)""",
    re.VERBOSE | re.DOTALL,
)
_LABEL_LISTS = ("by", "without", "on", "ignoring", "group_left", "group_right")
_WORDS = (
    "and", "or", "unless", "bool", "offset", "atan2", "inf", "nan", "default", "if", "ifnot", "limit",
    "keep_metric_names", "start", "end",
)  # fmt: skip


def selectors(query: str) -> list[str]:
    """Each selector of the query once, as ``name{matchers}``, without its range, offset and @."""
    tokens = [(kind, match.group()) for match in _TOKEN.finditer(query) if (kind := str(match.lastgroup)) != "skipped"]
    found = []
    at = 0
    while at < len(tokens):
        kind, token = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        if token == "[":
            at = _closed(tokens, at, "[", "]")
        elif token == "{":
            end = _closed(tokens, at, "{", "}")
            found.append("".join(text for _, text in tokens[at:end]))
            at = end
        elif kind != "name":
            at += 1
        elif token.lower() in _LABEL_LISTS:
            at = _closed(tokens, at + 1, "(", ")") if following == "(" else at + 1
        elif following == "(" or token.lower() in _WORDS or following.lower() in ("by", "without"):
            at += 1  # a function, an operator or an aggregation
        elif following == "{":
            end = _closed(tokens, at + 1, "{", "}")
            found.append("".join(text for _, text in tokens[at:end]))
            at = end
        else:
            found.append(token)
            at += 1
    return list(dict.fromkeys(found))


def _closed(tokens: list[tuple[str, str]], at: int, opening: str, closing: str) -> int:
    """The place after the bracket that closes the one at ``at``."""
    depth = 0
    while at < len(tokens):
        depth += (tokens[at][1] == opening) - (tokens[at][1] == closing)
        at += 1
        if depth == 0:
            break
    return at
