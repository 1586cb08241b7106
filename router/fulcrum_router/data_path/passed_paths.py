"""Paths of the APIs that are passed through, besides completions and chats: see `pass_through`."""

GENERATION_PATHS = frozenset({b"/v1/responses", b"/v1/messages"})
"""Paths whose requests generate tokens: each has a journey."""
POOLING_PATHS = frozenset(
    {
        b"/v1/embeddings",
        b"/v2/embed",
        b"/v1/score",
        b"/score",
        b"/v1/rerank",
        b"/v2/rerank",
        b"/rerank",
        b"/pooling",
        b"/classify",
        b"/tokenize",
        b"/detokenize",
        b"/v1/messages/count_tokens",
    }
)
"""Paths whose requests are answered in one step, or in none."""
PASS_THROUGH_PATHS = GENERATION_PATHS | POOLING_PATHS
