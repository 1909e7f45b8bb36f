"""Chat templates that read thoughts and tool calls, each in the way of a published family, in words of our own."""

_TEXT = (
    "{%- macro words(c) -%}{%- if c is string -%}{{ c }}{%- else -%}{%- for p in c -%}{%- if p['type'] == 'image' -%}"
    "{{ '<image>' }}{%- elif p['type'] == 'text' -%}{{ p['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
)
_LAST = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m['role'] == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
_TOOLS = (
    "{%- if tools -%}{{ '<|im_start|>system\\nTools:' }}{%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}"
    "{%- endfor -%}{{ '<|im_end|>\\n' }}{%- endif -%}"
)
_RESULT = (
    "{%- elif m['role'] == 'tool' -%}{%- if loop.previtem['role'] != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}"
    "{{ '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem['role'] != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}"
)
_OTHERS = "{%- else -%}{{ '<|im_start|>' + m['role'] + '\\n' + content + '<|im_end|>\\n' }}{%- endif -%}{%- endfor -%}"
_JSON_CALLS = (
    "{%- for call in m['tool_calls'] or [] -%}{%- if (loop.first and content) or not loop.first -%}{{ '\\n' }}"
    "{%- endif -%}"
    "{%- set f = call['function'] or call -%}{{ '<tool_call>\\n{\"name\": \"' + f['name'] + '\", \"arguments\": ' }}"
    "{{- f['arguments'] if f['arguments'] is string else f['arguments'] | tojson }}{{- '}\\n</tool_call>' }}"
    "{%- endfor -%}"
)
_ITEM_CALLS = (
    "{%- for call in m['tool_calls'] or [] -%}{%- set f = call['function'] -%}"
    "{{ '\\n\\n' if content and loop.first else '' if loop.first else '\\n' }}"
    "{{ '<tool_call>\\n<function=' + f['name'] + '>\\n' }}"
    "{%- if f['arguments'] is string -%}{{ raise_exception('arguments are a text') }}{%- endif -%}"
    "{%- for name, value in f['arguments'] | items -%}{{ '<parameter=' + name + '>\\n' }}"
    "{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor -%}"
    "{{ '</function>\\n</tool_call>' }}{%- endfor -%}"
)
_SPLIT = (
    "{%- if m['reasoning_content'] is string -%}{%- set thought = m['reasoning_content'] -%}"
    "{%- elif '</think>' in content -%}"
    "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}"
)
_PROMPT = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"

# Qwen3's: a thought after the last question, from a field or the text; calls as JSON.
QWEN3 = (
    _TEXT + _LAST + _TOOLS + "{%- for m in messages -%}{%- set content = words(m['content']) -%}"
    "{%- if m['role'] == 'assistant' -%}{%- set thought = '' -%}" + _SPLIT + "{{ '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) -%}"
    "{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif -%}{{ content }}"
    + _JSON_CALLS + "{{ '<|im_end|>\\n' }}" + _RESULT + _OTHERS + _PROMPT
)  # fmt: skip
# Qwen3.5's: a thought only from a field; calls as items with objects as arguments; an open prompt.
QWEN35 = (
    _TEXT + _LAST + _TOOLS + "{%- for m in messages -%}{%- set content = words(m['content']) | trim -%}"
    "{%- if m['role'] == 'assistant' -%}{{ '<|im_start|>assistant\\n' }}"
    "{%- if keep_thoughts or loop.index0 > ns.last -%}"
    "{{ '<think>\\n' + (m['reasoning_content'] or '') | trim + '\\n</think>\\n\\n' }}{%- endif -%}{{ content }}"
    + _ITEM_CALLS + "{{ '<|im_end|>\\n' }}" + _RESULT + _OTHERS
    + "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}"
)  # fmt: skip
# Gemma 4's: a channel of thoughts; results inside the call's turn, and the next answer continues that turn.
GEMMA4 = (
    _LAST + "{%- macro spoken(c) -%}{%- set ns = namespace(t='') -%}{%- set c = c if c is string else c[0]['text'] -%}"
    "{%- for part in c.split('<channel|>') -%}{%- set ns.t = ns.t + part.split('<|channel>')[0] -%}{%- endfor -%}"
    "{{ ns.t | trim }}{%- endmacro -%}"
    "{%- if tools -%}{{ '<|turn>system\\n' }}{%- for tool in tools -%}{{ '<|tool>' + (tool | tojson) + '<tool|>' }}"
    "{%- endfor -%}{{ '<turn|>\\n' }}{%- endif -%}"
    "{%- set was = namespace(open=false) -%}{%- for m in messages -%}"
    "{%- if m['role'] == 'tool' -%}"
    "{{ '<|tool_response>' + spoken(m['content']) + '<tool_response|>' }}"
    "{%- else -%}{%- if not was.open -%}"
    "{{ '<|turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}{%- endif -%}"
    "{%- set was.open = false -%}"
    "{%- set thought = m.get('reasoning') or m.get('reasoning_content') -%}"
    "{%- if thought and loop.index0 > ns.last -%}{{ '<|channel>thought\\n' + thought + '\\n<channel|>' }}{%- endif -%}"
    "{{ spoken(m['content']) }}"
    "{%- for call in m['tool_calls'] or [] -%}{{ '<|tool_call>call:' + call['function']['name'] + '{' }}"
    "{%- for name, value in call['function']['arguments'] | dictsort -%}{{ name + ':' + (value | string) }}"
    "{{- '' if loop.last else ',' }}{%- endfor -%}{{ '}<tool_call|>' }}{%- endfor -%}"
    "{%- if m['tool_calls'] -%}{%- set was.open = true -%}{%- if loop.last -%}{{ '<|tool_response>' }}{%- endif -%}"
    "{%- else -%}{{ '<turn|>\\n' }}{%- endif -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt and not was.open and messages[-1]['role'] != 'tool' -%}{{ '<|turn>model\\n' }}"
    "{%- endif -%}"
)
# Gemma 4's first one: a thought only with calls.
GEMMA4_CALLS = GEMMA4.replace("loop.index0 > ns.last -%}", "loop.index0 > ns.last and m['tool_calls'] -%}")
# Magistral's: thoughts are parts; a call is a name and arguments; no word comes before an answer.
MAGISTRAL = (
    "{%- macro words(c) -%}{%- if c is string -%}{{ c }}{%- else -%}{%- for p in c -%}{%- if p['type'] == 'text' -%}"
    "{{ p['text'] }}{%- elif p['type'] == 'thinking' -%}{{ '[THINK]' + p['thinking'] + '[/THINK]' }}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{%- if tools -%}{{ '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{%- endif -%}"
    "{%- for m in messages -%}{%- if m['role'] == 'user' -%}{{ '[INST]' + words(m['content']) + '[/INST]' }}"
    "{%- elif m['role'] == 'tool' -%}{{ '[RESULTS]' + words(m['content']) + '[/RESULTS]' }}"
    "{%- else -%}{{ words(m['content']) }}{%- for call in m['tool_calls'] or [] -%}"
    "{{ '[CALLS]' + call['function']['name'] + '[ARGS]' + call['function']['arguments'] }}{%- endfor -%}{{ eos_token }}"
    "{%- endif -%}{%- endfor -%}"
)
# DeepSeek-R1's: drops a thought in a text, and reads none.
DEEPSEEK = (
    _TEXT + "{%- for m in messages -%}{%- set content = words(m['content']) -%}{%- if m['role'] == 'assistant' -%}"
    "{%- set content = content.split('</think>')[-1] -%}{%- endif -%}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + content + '<|im_end|>\\n' }}{%- endfor -%}" + _PROMPT
)
# Writes all texts unchanged.
PLAIN = (
    _TEXT + "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\\n' + words(m['content']) + '<|im_end|>\\n' }}"
    "{%- endfor -%}" + _PROMPT
)
TOKENS = ("<|im_start|>", "<|im_end|>", "<turn|>", "<|turn>", "<|tool_response>")
