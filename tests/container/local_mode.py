"""Models in the local mode of SageMaker's SDK 2.x, which this runs with.

python local_mode.py IMAGE BUCKET PORT FOLDER SCRIPT

Writes the models' answers to FOLDER/answers.json. The environment has the address of S3.
"""

import json
import sys
from pathlib import Path

import boto3
from sagemaker.deserializers import JSONDeserializer
from sagemaker.local import LocalSession
from sagemaker.model import Model
from sagemaker.mxnet import MXNetModel
from sagemaker.predictor import Predictor
from sagemaker.serializers import JSONSerializer

ROLE = "arn:aws:iam::111122223333:role/any"
image, bucket, port, folder, script = sys.argv[1:]
session = LocalSession(boto3.Session(), default_bucket=bucket)
session.config = {"local": {"serving_port": int(port), "container_root": folder}}
ours = {
    "model_data": f"s3://{bucket}/fine-tunes/sowol.tar.gz",
    "role": ROLE,
    "image_uri": image,
    "sagemaker_session": session,
}
converted = {"serializer": JSONSerializer(), "deserializer": JSONDeserializer()}
answers = []
for model in (
    Model(predictor_cls=Predictor, **ours),
    MXNetModel(entry_point=script, framework_version="1.9.0", py_version="py38", **ours),
):
    predictor = model.deploy(1, "local", **converted)
    try:
        answers.append(predictor.predict("나는"))
    finally:
        predictor.delete_endpoint()
Path(folder, "answers.json").write_text(json.dumps(answers), encoding="utf-8")
