"""Builds a 2-layer random Llama with a tokenizer of its own, offline: `make_tiny_model.py OUT_DIR`.

The weights are large on purpose (initializer_range 0.3): greedy output then depends on every token of the
prompt, so a wrong or missing KV block shows as wrong tokens.
"""

import glob
import os
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

out = sys.argv[1]
text = sorted(glob.glob(os.path.dirname(torch.__file__) + "/nn/modules/*.py"))  # any text on the disk will do

tok = Tokenizer(models.BPE())
tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tok.decoder = decoders.ByteLevel()
specials = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
alphabet = pre_tokenizers.ByteLevel.alphabet()
tok.train(text, trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, special_tokens=specials))
fast = PreTrainedTokenizerFast(
    tokenizer_object=tok,
    unk_token="<unk>",
    bos_token="<s>",
    eos_token="</s>",
    pad_token="</s>",
    model_max_length=8192,
)
fast.chat_template = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
fast.save_pretrained(out)

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(fast),
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=8192,
    bos_token_id=fast.bos_token_id,
    eos_token_id=fast.eos_token_id,
    tie_word_embeddings=False,
    initializer_range=0.3,
    dtype="float32",
)
LlamaForCausalLM(config).to(torch.float32).save_pretrained(out)
