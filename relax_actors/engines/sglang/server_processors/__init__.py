"""SGLang's input processor for prompts with media, imported in the server's processes.

SGLang reads this package by the variable SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE.
"""
