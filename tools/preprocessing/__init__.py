# SPDX-License-Identifier: Apache-2.0
"""What `tools/preprocess_data.py` is made of.

Reading order: corpus, sentences, docstrings, vocabulary, encoding. A file imports only from those
before it.
"""
