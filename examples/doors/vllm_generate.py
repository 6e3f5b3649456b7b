"""Generate text with vLLM from a training checkpoint: vllm_generate.py CHECKPOINT [PROMPT].

This program has NOT been run with vLLM, which needs a GPU (docs/guides/vllm.md).
"""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM starts processes that import this
    llm = LLM(model=sys.argv[1], load_format="fastckpt")  # the argument to add
    prompt = sys.argv[2] if len(sys.argv) > 2 else "Checkpoints are"
    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=32, temperature=0))
    print(prompt, answer.outputs[0].text)
