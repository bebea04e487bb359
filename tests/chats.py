"""Chat templates as families of models have them, with and without marks, conversations, and a tokenizer for them.

python tests/chats.py >tests/unit/data/transformers.json    # with transformers 4: what it makes of them
python tests/chats.py prompts >tests/unit/data/prompts_of_transformers.json
"""

import json
import sys

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MARKERS = "<|im_start|> <|im_end|> <|user|> <|assistant|> <|tool|> [INST] [/INST] [CALLS]".split()
# Between § and ¶ the assistant writes.
_FAMILIES = {
    # Qwen2.5, ChatML, Phi-4: a header and an end for each turn
    "chatml": """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %} §
        {{- message.content }}
        {%- for call in message.tool_calls %}{{- '\\n<call>' + (call.function | tojson) + '</call>' }}{% endfor %}
        {{- '<|im_end|>\\n' }} ¶
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}""",
    # Llama 3: a token that begins the text, trimmed content
    "llama": """
{{- bos_token }}
{%- for message in messages %}
    {%- set content = message.content | trim + '<|im_end|>' %}
    {{- '<|im_start|>' + message.role + '\\n\\n' }}
    {%- if message.role == 'assistant' %} § {{- content }} ¶
    {%- else %}{{- content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{% endif %}""",
    # Gemma: no system's turn, and another name for the assistant
    "gemma": """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<|im_start|>' + role + '\\n' }}
    {%- if role == 'model' %} § {{- message.content | trim + '<|im_end|>\\n' }} ¶
    {%- else %}{{- message.content | trim + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>model\\n' }}{% endif %}""",
    # Mistral: no prompt of its own, tools and the system's turn beside the last question
    "mistral": """
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- set questions = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if tools and message == questions[-1] %}{{- '[TOOLS]' + (tools | tojson) }}{% endif %}
        {{- '[INST]' }}
        {%- if loop.last and messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{% endif %}
        {{- message.content + '[/INST]' }}
    {%- elif message.tool_calls %} §
        {{- '[CALLS]' }}{% for call in message.tool_calls %}{{- call.function | tojson }}{% endfor %}
        {{- eos_token }} ¶
    {%- elif message.role == 'assistant' %} §
        {{- ' ' + message.content + eos_token }} ¶
    {%- else %}
        {{- '<|tool|>' + message.content }}
    {%- endif %}
{%- endfor %}""",
    # DeepSeek-R1: thoughts are left out of turns, and the prompt opens one
    "thinker": """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|user|>' + message.content }}{% endif %}
    {%- if message.role == 'assistant' %}{{- '<|assistant|>' }} §
        {%- for call in message.tool_calls %}{{- call.function.name + call.function.arguments }}{% endfor %}
        {{- message.content.split('</think>')[-1] + eos_token }} ¶
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}{% endif %}""",
    # Qwen3: thoughts stay in the last turn only
    "rethinker": """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %} §
        {%- set parts = message.content.split('</think>') %}
        {%- set thought = parts[0].split('<think>')[-1] if parts | length > 1 else '' %}
        {%- if loop.last %}{{- '<think>' + thought + '</think>' }}{% endif %}
        {{- parts[-1] + '<|im_end|>\\n' }} ¶
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}""",
    # Zephyr: a prompt within the loop
    "looped": """
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' }}
    {%- if message.role == 'assistant' %} § {{- message.content + eos_token + '\\n' }} ¶
    {%- else %}{{- message.content + eos_token + '\\n' }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}
{%- endfor %}""",
    # Qwen1.5: the last turn has an end only where a prompt follows
    "open": """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %} § {{- message.content }}
        {%- if not loop.last or add_generation_prompt %}{{- '<|im_end|>\\n' }}{% endif %} ¶
    {%- else %}{{- message.content }}
        {%- if not loop.last or add_generation_prompt %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}""",
    # Llama 3, as it was first published: a prompt that always follows
    "prompting": """
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' }}
    {%- if message.role == 'assistant' %} § {{- message.content + eos_token }} ¶
    {%- else %}{{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>\\n' }}""",
}
MARKED = {
    name: text.replace("§", "{%- generation %}").replace("¶", "{%- endgeneration %}")
    for name, text in _FAMILIES.items()
}
PLAIN = {name: text.replace("§", "").replace("¶", "") for name, text in _FAMILIES.items()}


def turns(*texts, system=None):
    """Messages of the user and the assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}] * bool(system) + messages


CALL = {"type": "function", "function": {"name": "sum", "arguments": {"of": [1, 2]}}}
TOOLS = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]
CONVERSATIONS = {
    "plain": {"messages": turns("Hi", "Hello <b>ü</b> 😀", " 1 + 1? ", "<2>")},
    "system": {"messages": turns("Hi", "Hello", system="Be kind.")},
    "thoughts": {"messages": turns("Hi", "<think>hm</think>Hello", "Why?", "<think>so</think>Thus")},
    "calls": {
        "messages": [
            *turns("1 + 2?", "Wait."),
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "It is 3."},
        ],
        "tools": TOOLS,
    },
}


def make_tokenizer():
    """A token for each byte and each marker, and for a few pairs of letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("e", "l"), ("el", "l"), ("Ġ", "i"), ("H", "i"), ("Ċ", "Ċ")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIAL.values(), *MARKERS)])
    return tokenizer


def save_tokenizer(folder, template=None):
    """The tokenizer as a Hugging Face folder, with a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    config |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _of(template):
    """The conversations that a template writes whole; ours refuses to leave calls out."""
    return {name: record for name, record in CONVERSATIONS.items() if name != "calls" or "tool_calls" in template}


def _of_transformers():
    """{template: {conversation: [ids, mask as a text of 0 and 1]}} where transformers renders it."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), **SPECIAL)
    found = {}
    for name, template in MARKED.items():
        tokenizer.chat_template = template
        for called, record in _of(template).items():
            try:
                made = tokenizer.apply_chat_template(
                    record["messages"],
                    tools=record.get("tools"),
                    tokenize=True,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                )
            except Exception:  # a template that refuses, or wants the arguments of calls as a text
                continue
            mask = "".join(map(str, made["assistant_masks"]))
            found.setdefault(name, {})[called] = [made["input_ids"], mask]
    return found


def asking(messages):
    """The conversation before its last answer."""
    last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
    return messages[:last]


def _prompts_of_transformers():
    """{template: {conversation: ids of the prompt for its last answer}} where transformers renders it."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), **SPECIAL)
    found = {}
    for name, tokenizer.chat_template in PLAIN.items():
        for called, record in _of(tokenizer.chat_template).items():
            try:
                found.setdefault(name, {})[called] = tokenizer.apply_chat_template(
                    asking(record["messages"]), tools=record.get("tools"), add_generation_prompt=True
                )
            except Exception:  # a template that refuses, or wants the arguments of calls as a text
                continue
    return found


if __name__ == "__main__":
    print("{")
    made_by = _prompts_of_transformers if sys.argv[1:] == ["prompts"] else _of_transformers
    lines = [f'"{name}": {json.dumps(made, separators=(",", ":"))}' for name, made in made_by().items()]
    print(",\n".join(lines) + "\n}")
