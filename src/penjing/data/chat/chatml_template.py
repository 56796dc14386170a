"""The chat template, for engines that render conversations themselves; a test compares it with `data/chat/render.py`.

ChatML. A turn: <|im_start|>role, newline, content, <|im_end|>, newline. Assistant turns may open with their thinking
and close with tool calls; tools are listed, one JSON object per line, at the end of the system turn; tool results
travel in a user turn.

transformers switches on `trim_blocks`, which drops a newline right after `%}`; other engines do not. So a newline that
counts and would stand there is written as an expression.

The switch is `enable_thinking`, as Qwen3 calls it. Not given, it does not exist: turns without a thought have no
`<think>`, and the model begins its turn as it likes. Given, every turn of the assistant opens with a thought, empty
where nothing was thought; asked to answer, true opens a thought, and false opens and closes an empty one.
"""

CHAT_TEMPLATE = """\
{%- if tools or (messages and messages[0].role == 'system') -%}
<|im_start|>system
{% if messages and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools -%}
{%- if messages and messages[0].role == 'system' and messages[0].content %}{{ '\\n\\n' }}{% endif -%}
# Tools
{%- for tool in tools %}{{ '\\n' }}{{ (tool.function if tool.function else tool) | tojson }}{% endfor %}
{%- endif %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}{{ '\\n' }}<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif -%}
{%- elif message.role == 'assistant' -%}
<|im_start|>assistant
{% if message.reasoning_content -%}
<think>{{ '\\n' }}{{ message.reasoning_content }}{{ '\\n' }}</think>{{ '\\n\\n' }}
{%- elif enable_thinking is defined and enable_thinking is not none -%}
<think></think>{{ '\\n\\n' }}
{%- endif %}
{{- (message.content or '').lstrip('\\n') }}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function if call.function else call -%}
{% if not loop.first or message.content %}{{ '\\n' }}{% endif %}<tool_call>
{{ {'name': call.name, 'arguments': call.arguments} | tojson }}
</tool_call>
{%- endfor -%}<|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking %}<think>
{% elif enable_thinking is defined and enable_thinking is not none %}<think></think>{{ '\\n\\n' }}
{%- endif -%}
{%- endif -%}
"""
