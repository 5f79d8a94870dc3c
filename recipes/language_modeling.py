"""`hf-attn-swap train language-modeling`, from a clone."""

from hf_attn_swap.training.recipes.language_modeling import main

if __name__ == "__main__":
    main()
