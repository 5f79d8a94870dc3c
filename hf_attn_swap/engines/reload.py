"""Loads an exported folder in a process without this package, and writes its logits to a file.

`export` runs this text by `python -c` and never imports it: the arguments are the folder, a safetensors file with the
inputs, and a safetensors file for the logits. It computes in fp32, on a CPU.
"""

import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

if "hf_attn_swap" in sys.modules:
    sys.exit("hf_attn_swap was imported, so that nothing is shown about programs without it")
folder, given, result = sys.argv[1:]
config = transformers.AutoConfig.from_pretrained(folder)
model = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.float32).eval()
with torch.no_grad():
    logits = model(**load_file(given), return_dict=True)[0]
save_file({"logits": logits.contiguous()}, result)
