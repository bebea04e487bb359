"""The flags of run_eval.py: what it evaluates, and by which tasks."""

from __future__ import annotations

from paddle_te.options.layers import LAYERS
from paddle_te.options.option import (
    FLAG,
    FRACTION,
    NOT_NEGATIVE,
    PATH,
    RANKS,
    SAMPLES,
    SEQUENCES,
    TEXT,
    TEXTS,
    TOKENS,
    Option,
    choice,
    whole,
)
from paddle_te.options.training import PADDLENLPS, TRAINING
from paddle_te.options.tuning import FINETUNE_DATA, FINETUNE_MODEL

DTYPES = ("float32", "bfloat16", "float16")
_OF = {option.name: option for option in (*LAYERS, *TRAINING, *PADDLENLPS, *FINETUNE_MODEL, *FINETUNE_DATA)}
EVALUATED_MODEL = (
    _OF["model_name_or_path"],
    _OF["tokenizer_name_or_path"],
    Option(
        "lora_path",
        PATH,
        None,
        "Folder of a LoRA adapter, ours, PaddleNLP's or PEFT's, which is added to the weights.",
        doc="adapter, of any backend or PEFT's, added to the weights",
        zh="adapter（任意后端或 PEFT 的），合并到权重中",
    ),
    _OF["transformer_engine_backend"].but(help="none, paddle or transformer_engine."),
    Option(
        "dtype",
        choice(*DTYPES),
        "float32",
        doc="of the weights: `float32`, `bfloat16`, `float16` (te: not `float32`)",
        zh="权重的类型：`float32`、`bfloat16`、`float16`（te 不支持 `float32`）",
    ),
    _OF["device"].but(
        source="", default="cpu", help="cpu, gpu or nvgpu.", doc="`cpu`, `gpu`, `nvgpu`", zh="`cpu`、`gpu`、`nvgpu`"
    ),
    _OF["verify_checkpoint"].but(
        doc="what a folder with a manifest must agree with it in before it is read: `full` (sizes and checksums), "
        "`size`, `none`",
        zh="读取之前，带有 manifest 的文件夹须与其一致的内容：`full`（大小与校验和）、`size`（大小）、`none`",
    ),
    _OF["use_fp8"],
    _OF["fp8_recipe"].but(
        default="current",
        help="current, or delayed: with the scales that the checkpoint's training left.",
        doc="`current`; `delayed` needs the `fp8_state` that training left next to the weights",
        zh="`current`；`delayed` 需要训练时保存在权重旁边的 `fp8_state` 文件",
    ),
    _OF["fp8_dpa"].but(
        doc="attention in fp8 as well, as the checkpoint was trained (delayed scaling)",
        zh="attention 也用 fp8，与训练时相同（delayed scaling）",
    ),
    _OF["fp8_lm_head"].but(
        help="The language model's head in fp8 as well, as the checkpoint was trained.",
        doc="lm_head in fp8 as well, as the checkpoint was trained",
        zh="lm_head 也用 fp8，与训练时相同",
    ),
    Option(
        "max_seq_length",
        TOKENS,
        None,
        "Tokens that the model sees. Default: its seq_length.",
        doc="tokens that the model sees",
        zh="模型能看到的 token 数",
        shown="what it was trained with; 2048 for Hugging Face's",
        shown_zh="训练时的长度；Hugging Face 的模型为 2048",
    ),
    Option(
        "batch_size",
        SEQUENCES,
        8,
        doc="sequences computed together",
        zh="一起计算的序列数",
    ),
    _OF["pipeline_parallel_degree"].but(
        source="",
        kind=RANKS,
        default=1,
        help="Groups of layers, each with its share of the processes; the rest is tensor parallelism.",
        doc="of several processes: into so many groups of layers the model is divided; the rest is tensor parallelism",
        zh="多个进程时，模型按层分为若干段；其余为张量并行",
    ),
    _OF["chat_template"].but(
        doc="file of a Jinja template; `none`: no template; see [chats](../guides/generate.md#chats)",
        zh="Jinja 模板文件；`none`：不用模板；见[对话](../guides/fine-tune.md#data)",
    ),
    Option(
        "chat_template_kwargs",
        TEXT,
        None,
        'JSON object of further variables of the chat template, such as {"enable_thinking": false}.',
        doc="further variables of the template, a JSON object: `'{\"enable_thinking\": false}'`",
        zh="模板的其他变量，JSON 对象：`'{\"enable_thinking\": false}'`",
    ),
)
EVALUATION_TASKS = (
    Option(
        "perplexity",
        PATH,
        None,
        doc='JSON lines `{"text"}`, [conversations](../guides/generate.md#chats), whose answers count, or a prefix of '
        "`.bin`/`.idx`",
        zh='JSON lines `{"text"}`；[对话](../guides/fine-tune.md#data)，只计回答；或 `.bin`/`.idx` 的前缀',
    ),
    Option(
        "boolq",
        PATH,
        None,
        doc='JSON lines `{"passage", "question", "answer"}`, SuperGLUE\'s',
        zh='JSON lines `{"passage", "question", "answer"}`，同 SuperGLUE',
    ),
    Option(
        "lambada",
        PATH,
        None,
        doc='JSON lines `{"text"}`; the last word is asked for',
        zh='JSON lines `{"text"}`，预测最后一个词',
    ),
    Option(
        "multiple_choice",
        PATH,
        None,
        doc='JSON lines `{"query", "choices", "gold"}`',
        zh='JSON lines `{"query", "choices", "gold"}`',
    ),
    Option(
        "lm_eval",
        TEXTS,
        None,
        doc="tasks of EleutherAI's harness: names, or `.yaml` files (`pip install 'paddle_te[harness]'`)",
        zh="EleutherAI harness 的任务：名称或 `.yaml` 文件（`pip install 'paddle_te[harness]'`）",
    ),
    Option(
        "limit",
        SAMPLES,
        None,
        "Read no more than so many examples (windows of a .bin/.idx pair).",
        doc="examples, or windows of a `.bin`/`.idx` pair",
        zh="样本数，或 `.bin`/`.idx` 的窗口数",
        shown="all",
        shown_zh="全部",
    ),
    Option(
        "prompts",
        TEXTS,
        None,
        doc="texts to continue, with a key-value cache; te in bfloat16",
        zh="要续写的文本，使用 KV cache；te 用 bfloat16",
    ),
    Option(
        "prompts_file",
        PATH,
        None,
        doc='file of prompts: [conversations](../guides/generate.md#chats), or `{"text"}`',
        zh='存放 prompt 的文件：[对话](../guides/fine-tune.md#data)，或 `{"text"}`',
    ),
    Option(
        "apply_chat_template",
        FLAG,
        False,
        doc="make a [chat](../guides/generate.md#chats) of each prompt that is a text, and of the harness's prompts",
        zh="把每个文本 prompt 以及 harness 的 prompt 变为[对话](../guides/fine-tune.md#data)",
    ),
    Option(
        "system_instruction",
        TEXT,
        None,
        doc="the system's turn of chats that have none",
        zh="没有 system 轮的对话所用的 system 内容",
    ),
    Option("max_new_tokens", TOKENS, 32, doc="length of a continuation", zh="续写长度"),
    Option(
        "temperature",
        NOT_NEGATIVE,
        0.0,
        doc="0: the likeliest token each time; above 0: sampling, from logits that are divided by it",
        zh="0：每次取概率最高的 token；大于 0：sampling，logits 除以该值",
    ),
    Option(
        "top_k",
        whole(0, limit=2**31 - 1),
        0,
        doc="sampling: from so many likeliest tokens; 0: all",
        zh="sampling：从概率最高的若干 token 中抽取；0：全部",
    ),
    Option(
        "top_p",
        FRACTION,
        1.0,
        doc="sampling: from the likeliest tokens that have this probability together",
        zh="sampling：从累计概率达到该值的 token 中抽取",
    ),
    _OF["seed"].but(source="", default=42, doc="of sampling", zh="sampling 的随机种子"),
    Option(
        "output_file",
        PATH,
        None,
        doc="JSON file for the results",
        zh="存放结果的 JSON 文件",
    ),
)
