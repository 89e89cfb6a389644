"""Token ids whose texts say that a completion ends, such as `<|im_end|>` or `</s>`."""

import re
from collections.abc import Mapping

BARS = "|\uff5c"  # the wide one too
END_TEXT = re.compile(
    rf"<[{BARS}]?(?:/s|eos|eod|eo[tm](?:_id)?|return|(?:im_|turn_|message_)?end"
    r"|end_?of_?(?:text|turn|sentence|message|document|utterance)"
    rf"(?:_token)?)[{BARS}]?>|\[(?:eos|sep)\]",
    re.IGNORECASE,
)
MOST_IDS = 64  # a vocabulary has a handful


def find_end_like_ids(texts: Mapping[int, str]) -> list[int]:
    """Return the ids whose text is that of an end token, whether or not the model uses it as one.

    >>> find_end_like_ids({0: "<pad>", 1: "<|eos|>", 2: "</s>", 3: "end", 4: "<|end▁of▁sentence|>"})
    [1, 2, 4]
    >>> find_end_like_ids({7: "</think>", 8: "<|end_header_id|>", 9: "<|im_start|>"})
    []
    """
    end_ids = [i for i, text in texts.items() if END_TEXT.fullmatch(text.strip().replace("▁", "_"))]
    return sorted(end_ids)[:MOST_IDS]
