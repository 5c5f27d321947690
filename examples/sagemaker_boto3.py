"""A fine-tune behind a SageMaker multi-model endpoint by boto3: packed, called, scaled, deleted.

python examples/sagemaker_boto3.py FOLDER BUCKET IMAGE ROLE_ARN
"""

import json
import sys
import tarfile

import boto3

folder, bucket, image, role = sys.argv[1:]
with tarfile.open("sowol.tar.gz", "w:gz") as tar:  # kogpt2 package looks at it, too
    tar.add(folder, ".")
boto3.client("s3").upload_file("sowol.tar.gz", bucket, "fine-tunes/sowol.tar.gz")

client, name = boto3.client("sagemaker"), "poems"
container = {"Image": image, "Mode": "MultiModel", "ModelDataUrl": f"s3://{bucket}/fine-tunes/"}
client.create_model(ModelName=name, ExecutionRoleArn=role, PrimaryContainer=container)
instances = {"InstanceType": "ml.m5.large", "InitialInstanceCount": 1}
variant = {"VariantName": "AllTraffic", "ModelName": name, **instances}
client.create_endpoint_config(EndpointConfigName=name, ProductionVariants=[variant])
client.create_endpoint(EndpointName=name, EndpointConfigName=name)
client.get_waiter("endpoint_in_service").wait(EndpointName=name)

body = json.dumps({"inputs": "나 보기가 역겨워", "parameters": {"max_new_tokens": 16}})
call = {"TargetModel": "sowol.tar.gz", "ContentType": "application/json", "Body": body}
answer = boto3.client("sagemaker-runtime").invoke_endpoint(EndpointName=name, **call)
print(json.load(answer["Body"])["generated_text"])

more = {"VariantName": "AllTraffic", "DesiredInstanceCount": 2}
client.update_endpoint_weights_and_capacities(EndpointName=name, DesiredWeightsAndCapacities=[more])
client.get_waiter("endpoint_in_service").wait(EndpointName=name)
client.delete_endpoint(EndpointName=name)
client.delete_endpoint_config(EndpointConfigName=name)
client.delete_model(ModelName=name)
