"""Chat templates in the manner of those that models ship, for the byte tokenizer."""

TOOLS = (
    "{% if tools %}<|im_start|>system\n# Tools"
    "{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Hermes' way: tools in the system turn, calls as JSON behind the content."""

REASONING = (
    "{%- set last = namespace(user=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- set content = message.content %}{%- set thought = message.reasoning_content or '' %}"
    "{%- if not thought and '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and loop.index0 > last.user and (loop.last or thought) %}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
"""Qwen3's way: an answer loses its reasoning once the user speaks again; without thinking the prompt has it empty."""
