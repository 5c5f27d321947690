"""A fine-tune behind a SageMaker multi-model endpoint by the classes of SageMaker's SDK, 3.x.

pip install sagemaker-core==2.27.0
python examples/sagemaker_sdk.py FOLDER BUCKET IMAGE ROLE_ARN
"""

import json
import sys
import tarfile

import boto3
from sagemaker.core.resources import Endpoint, EndpointConfig, Model
from sagemaker.core.shapes import (
    ContainerDefinition,
    DesiredWeightAndCapacity,
    ProductionVariant,
)

folder, bucket, image, role = sys.argv[1:]
with tarfile.open("sowol.tar.gz", "w:gz") as tar:  # kogpt2 package looks at it, too
    tar.add(folder, ".")
boto3.client("s3").upload_file("sowol.tar.gz", bucket, "fine-tunes/sowol.tar.gz")

models = f"s3://{bucket}/fine-tunes/"
container = ContainerDefinition(image=image, mode="MultiModel", model_data_url=models)
model = Model.create(model_name="poems", execution_role_arn=role, primary_container=container)
instances = {"instance_type": "ml.m5.large", "initial_instance_count": 1}
variant = ProductionVariant(variant_name="AllTraffic", model_name="poems", **instances)
config = EndpointConfig.create(endpoint_config_name="poems", production_variants=[variant])
endpoint = Endpoint.create(endpoint_name="poems", endpoint_config_name="poems")
endpoint.wait_for_status("InService")

body = json.dumps({"inputs": "나 보기가 역겨워", "parameters": {"max_new_tokens": 16}})
call = {"target_model": "sowol.tar.gz", "content_type": "application/json"}
print(json.load(endpoint.invoke(body=body, **call).body)["generated_text"])

more = DesiredWeightAndCapacity(variant_name="AllTraffic", desired_instance_count=2)
endpoint.update_weights_and_capacities(desired_weights_and_capacities=[more])
endpoint.wait_for_status("InService")
for made in (endpoint, config, model):
    made.delete()
