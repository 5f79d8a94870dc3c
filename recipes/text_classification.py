"""`hf-attn-swap train text-classification`, from a clone."""

from hf_attn_swap.training.recipes.text_classification import main

if __name__ == "__main__":
    main()
