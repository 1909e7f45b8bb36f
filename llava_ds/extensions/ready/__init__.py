"""Ready vision-language models: folders of transformers' own classes, which bring tower, connector and processor."""
