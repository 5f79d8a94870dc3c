"""`hf-attn-swap train image-classification`, from a clone."""

from hf_attn_swap.training.recipes.image_classification import main

if __name__ == "__main__":
    main()
