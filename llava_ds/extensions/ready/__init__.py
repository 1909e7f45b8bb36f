"""Ready vision-language models: folders of transformers' own classes, including tower, connector and processor."""
