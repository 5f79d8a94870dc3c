"""BibTeX entries of the papers behind the variants. `About.paper` names a paper by words that find its entry."""

from __future__ import annotations

# Key: words that stand in `About.paper`. A variant that cites another paper adds the paper's entry here.
ENTRIES = {
    "Vaswani": """@inproceedings{vaswani2017attention,
  title = {Attention Is All You Need},
  author = {Vaswani, Ashish and Shazeer, Noam and Parmar, Niki and Uszkoreit, Jakob and Jones, Llion and
            Gomez, Aidan N. and Kaiser, {\\L}ukasz and Polosukhin, Illia},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2017}
}""",
    "BeliefFormer": """@misc{beliefformer,
  title = {{BeliefFormer}: Belief Attention in Transformer},
  author = {{Anonymous}},
  note = {Submitted to the International Conference on Learning Representations 2026},
  url = {https://openreview.net/forum?id=Ard2QzPAUK},
  year = {2025}
}""",
    "modern Hopfield attention": """@inproceedings{masumura2025hidden,
  title = {On the Role of Hidden States of Modern {Hopfield} Network in Transformer},
  author = {Masumura, Tsubasa and Taki, Masato},
  booktitle = {Advances in Neural Information Processing Systems},
  eprint = {2511.20698},
  archivePrefix = {arXiv},
  year = {2025}
}""",
    "OutEffHop": """@inproceedings{hu2024outeffhop,
  title = {Outlier-Efficient {Hopfield} Layers for Large Transformer-Based Models},
  author = {Hu, Jerry Yao-Chieh and Chang, Pei-Hsuan and Luo, Robin and Chen, Hong-Yu and Li, Weijian and
            Wang, Wei-Po and Liu, Han},
  booktitle = {International Conference on Machine Learning},
  eprint = {2404.03828},
  archivePrefix = {arXiv},
  year = {2024}
}""",
    "Bondarenko": """@inproceedings{bondarenko2023quantizable,
  title = {Quantizable Transformers: Removing Outliers by Helping Attention Heads Do Nothing},
  author = {Bondarenko, Yelysei and Nagel, Markus and Blankevoort, Tijmen},
  booktitle = {Advances in Neural Information Processing Systems},
  eprint = {2306.12929},
  archivePrefix = {arXiv},
  year = {2023}
}""",
    "SparseHopfield": """@inproceedings{hu2023sparse,
  title = {On Sparse Modern {Hopfield} Model},
  author = {Hu, Jerry Yao-Chieh and Yang, Donglin and Wu, Dennis and Xu, Chenwei and Chen, Bo-Yu and Liu, Han},
  booktitle = {Advances in Neural Information Processing Systems},
  eprint = {2309.12673},
  archivePrefix = {arXiv},
  year = {2023}
}""",
    "STanHop": """@inproceedings{wu2024stanhop,
  title = {{STanHop}: Sparse Tandem {Hopfield} Model for Memory-Enhanced Time Series Prediction},
  author = {Wu, Dennis and Hu, Jerry Yao-Chieh and Li, Weijian and Chen, Bo-Yu and Liu, Han},
  booktitle = {International Conference on Learning Representations},
  eprint = {2312.17346},
  archivePrefix = {arXiv},
  year = {2024}
}""",
    "Sun et al.": """@inproceedings{sun2024massive,
  title = {Massive Activations in Large Language Models},
  author = {Sun, Mingjie and Chen, Xinlei and Kolter, J. Zico and Liu, Zhuang},
  booktitle = {Conference on Language Modeling},
  eprint = {2402.17762},
  archivePrefix = {arXiv},
  year = {2024}
}""",
    "gpt-oss": """@misc{openai2025gptoss,
  title = {gpt-oss-120b \\& gpt-oss-20b Model Card},
  author = {{OpenAI}},
  eprint = {2508.10925},
  archivePrefix = {arXiv},
  year = {2025}
}""",
    "Longformer": """@misc{beltagy2020longformer,
  title = {Longformer: The Long-Document Transformer},
  author = {Beltagy, Iz and Peters, Matthew E. and Cohan, Arman},
  eprint = {2004.05150},
  archivePrefix = {arXiv},
  year = {2020}
}""",
    "StreamingLLM": """@inproceedings{xiao2024streaming,
  title = {Efficient Streaming Language Models with Attention Sinks},
  author = {Xiao, Guangxuan and Tian, Yuandong and Chen, Beidi and Han, Song and Lewis, Mike},
  booktitle = {International Conference on Learning Representations},
  eprint = {2309.17453},
  archivePrefix = {arXiv},
  year = {2024}
}""",
    "DuoAttention": """@inproceedings{xiao2025duoattention,
  title = {{DuoAttention}: Efficient Long-Context {LLM} Inference with Retrieval and Streaming Heads},
  author = {Xiao, Guangxuan and Tang, Jiaming and Zuo, Jingwei and Guo, Junxian and Yang, Shang and
            Tang, Haotian and Fu, Yao and Han, Song},
  booktitle = {International Conference on Learning Representations},
  eprint = {2410.10819},
  archivePrefix = {arXiv},
  year = {2025}
}""",
    "SimpleTRON": """@misc{yorsh2021simpletron,
  title = {{SimpleTRON}: Simple Transformer with {O(N)} Complexity},
  author = {Yorsh, Uladzislau and Kovalenko, Alexander and Van{\\v{c}}ura, Vojt{\\v{e}}ch and
            Va{\\v{s}}ata, Daniel and Kord{\\'i}k, Pavel and Mikolov, Tom{\\'a}{\\v{s}}},
  eprint = {2111.15588},
  archivePrefix = {arXiv},
  year = {2021}
}""",
}


def bibtex(paper: str) -> list[str]:
    """The BibTeX entries of the papers that a variant names, such as "OutEffHop (Hu et al., 2024)".

    Raises:
        ValueError: no entry matches the name.
    """
    found = [entry for words, entry in ENTRIES.items() if words in paper]
    if not found:
        raise ValueError(f"no citation for the paper {paper!r}; known are {', '.join(ENTRIES)}.")
    return found
