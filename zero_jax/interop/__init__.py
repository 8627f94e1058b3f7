"""Parameters from and to safetensors files.

Reading order: `params_io` (import and export), `naming` (rules from our names to those of a file), `safetensors_file`
(the format), `lora_files` (adapters).
"""
