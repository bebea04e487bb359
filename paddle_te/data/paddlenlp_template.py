"""PaddleNLP's chat_template.json as a template of Hugging Face's kind.

It has a Jinja text for what stands before the turns, one for each side of a round, and one for the last question:
{"system": …, "conversation": ["…{{user}}…", "{{bot}}…"], "query": "…{{query}}…"}
"""

from __future__ import annotations

from typing import Any

# "+" keeps the blanks and line ends beside a tag, which belong to the texts.
_FRAME = """\
{{%+ if messages[0].role not in ('user', 'assistant') +%}}\
{{{{ raise_exception('it has no turn of the ' ~ messages[0].role) }}}}{{%+ endif +%}}\
{{%+ set is_training = not add_generation_prompt +%}}{{%+ set length = (messages | length + 1) // 2 +%}}{system}\
{{%+ for message in messages +%}}{{%+ set index = loop.index0 // 2 +%}}\
{{%+ set is_first = index == 0 +%}}{{%+ set is_last = index == length - 1 +%}}\
{{%+ if message.role != ('user', 'assistant')[loop.index0 % 2] +%}}\
{{{{ raise_exception('it writes questions and answers in turn') }}}}\
{{%+ elif message.role == 'assistant' +%}}{{%+ set bot = message.content +%}}\
{{%+ generation +%}}{bot}{{%+ endgeneration +%}}\
{{%+ elif loop.last and add_generation_prompt +%}}{{%+ set query = message.content +%}}{query}\
{{%+ else +%}}{{%+ set user = message.content +%}}{user}{{%+ endif +%}}{{%+ endfor +%}}"""


def is_paddlenlps(said: Any) -> bool:
    """Whether the content of a chat_template.json is PaddleNLP's; that of transformers' processors is another."""
    return isinstance(said, dict) and bool({"conversation", "query"} & said.keys())


def as_template(said: dict[str, Any]) -> str:
    """Return the template. Raises ValueError for a file without texts for both sides of a round."""
    rounds, system, query = (said.get(name) for name in ("conversation", "system", "query"))
    texts = [system or "", query or "{{ query }}", *(rounds if isinstance(rounds, list) else [])]
    if len(texts) != 4 or not all(isinstance(text, str) for text in texts):
        raise ValueError('needs "conversation", the texts of a question and of its answer')
    return _FRAME.format(system=texts[0], query=texts[1], user=texts[2], bot=texts[3])
