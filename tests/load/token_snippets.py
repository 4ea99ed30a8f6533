"""A few hundred texts on which tokenizers like to differ. Fixed: the golden file needs them so."""

# ruff: noqa: RUF001  (look-alike letters are what this file is for)

from __future__ import annotations

_PROSE = """The capital of France is
It's we're I'll you'd they've DON'T can't 'tis
Hello, world! How are you today?
In 1984, George Orwell's novel was 35 years old.
 leading space
  two leading spaces
trailing space 
tab\tbetween\ttabs
double  spaces   triple    quad
e-mail: someone@example.org, see https://example.org/a/b?c=d&e=f#g
"quoted" 'single' `back` «guillemets» „low“ ‘curly’
Mr. Smith (aged 42) paid $3.50 for 1,000,000 items.
e.g. i.e. etc. vs. U.S.A.
ALL CAPS AND MiXeD cAsE
supercalifragilisticexpialidocious antidisestablishmentarianism
a b c d e f g h i j k l m n o p
?!?!...---___***+++===
semi;colon:comma,period.slash/back\\slash|pipe
wait... what?! no—yes–maybe
100% of 50° at 20℃ ≈ 3.14159 ± 0.001"""

_NUMBERS = """0
7
42
123
1234567890
3.14159
1e-5
-17
+49 30 1234567
2026-11-29T21:43:00Z
 1
 12
  123
v1.2.3-rc4
0xDEADBEEF
1/2 3/4
x1y2z3
½ ² ³ ₄ ①
٣٤٥
१२३
１２３"""

_CODE = """def f(x: int) -> int:\n    return x ** 2\n
for (int i = 0; i < 10; ++i) {\n\tprintf("%d\\n", i);\n}
SELECT * FROM users WHERE id = 42 AND name LIKE '%x%';
import numpy as np\nx = np.zeros((3, 4), dtype=np.float32)[:, ::-1]
{"key": [1, 2, {"nested": null}], "b": true}
<div class="a" id='b'>text &amp; more</div>
#include <stdio.h>\n#define MAX(a,b) ((a)>(b)?(a):(b))
git commit -m "fix: handle None" && git push --force-with-lease
let f = async (x) => { await g(x ?? 0); };
fn main() -> Result<(), Box<dyn Error>> { Ok(()) }
        eight spaces of indent
\t\t\tthree tabs
a\n\nb\n\n\nc
line\r\nwindows\r\n
   \n  \n \n
$HOME/.config/x.yaml: line 3: `foo`
lambda *args, **kwargs: None
x = y if z else -w  # comment
std::vector<std::unique_ptr<Foo>>&&
\\frac{a}{b} \\sum_{i=0}^{n} x_i^2"""

_LANGUAGES = """Der schnelle braune Fuchs springt über den faulen Hund. Größe, Straße, ÄÖÜ.
Voilà l'été à Noël, où ça? Œuvre, naïve, garçon.
El niño comió piñas en España. ¿Qué? ¡Sí!
Příliš žluťoučký kůň úpěl ďábelské ódy.
Съешь же ещё этих мягких французских булок, да выпей чаю.
Γειά σου Κόσμε, τι κάνεις;
你好，世界！今天天气怎么样？
日本語のテキスト、カタカナとひらがな。
안녕하세요 세계, 잘 지내세요?
مرحبا بالعالم، كيف حالك؟
שלום עולם, מה שלומך?
नमस्ते दुनिया, आप कैसे हैं?
สวัสดีชาวโลก
Xin chào thế giới, bạn khỏe không?
Türkçe: ığüşöç İIıi
𝕳𝖊𝖑𝖑𝖔 𝓌𝑜𝓇𝓁𝒹"""

_SYMBOLS = """🙂
🙂🙂 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪
I ❤️ you 💔
→ ← ↑ ↓ ⇒ ∀ ∃ ∈ ∉ ∑ ∏ √ ∞
∫_0^1 x² dx ≤ ½
é e\u0301 ﬁ ﬀ Å
zero\u200bwidth no\u00a0break em\u2003space \ufeffbom
a\u0300\u0301\u0302\u0303 zalgo
\u0000 \u0001 \u007f
€ £ ¥ ₹ ₿ © ® ™ § ¶ † ‡ • …"""

_SPECIAL = """<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
<|endoftext|>
text<|endoftext|>text
<|im_start|><|im_end|>
 <|im_end|> 
<|im_start
<|not_special|>
<repo_name>x<file_sep>y"""


def snippets() -> list[str]:
    """Every line of the lists, alone, joined in pairs, cut in halves, and repeated."""
    lists = (_PROSE, _NUMBERS, _CODE, _LANGUAGES, _SYMBOLS, _SPECIAL)
    lines = [line for text in lists for line in text.split("\n") if line]
    pairs = [f"{a} {b}" for a, b in zip(lines, lines[7:], strict=False)]
    halves = [line[len(line) // 2 :] for line in lines if len(line) > 5]
    numbered = [f"{line}\n{number} {line}" for number, line in enumerate(lines[:40], 97)]
    blanks = [" " * n + "x" + "\n" * n for n in range(1, 12)]
    return list(dict.fromkeys([*lines, *pairs, *halves, *numbered, *blanks, *lists]))
