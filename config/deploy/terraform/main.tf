# The stack of ../cloudformation.yaml as a Terraform module. The template itself is used, so that both
# ways make the same resources, and one set of tests covers both.
terraform {
  required_version = ">= 1.3"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.0"
    }
  }
}

resource "aws_cloudformation_stack" "fleet" {
  name          = coalesce(var.name, var.application)
  template_body = file("${path.module}/../cloudformation.yaml")
  # The role of the machines.
  capabilities = ["CAPABILITY_IAM"]
  tags         = var.tags

  parameters = {
    Application           = var.application
    TableStreamArn        = var.table_stream_arn
    ShardCount            = var.shard_count
    RetentionHours        = var.retention_hours
    Bundle                = var.bundle
    VpcId                 = var.vpc_id
    Subnets               = join(",", var.subnets)
    ImageId               = var.image_id
    InstanceType          = var.instance_type
    MachinesMin           = var.machines_min
    MachinesMax           = var.machines_max
    LeasesMax             = var.leases_max
    FetchMode             = var.fetch_mode
    ScaleBy               = var.scale_by
    BytesPerMachineMinute = var.bytes_per_machine_minute
    LeasesPerMachine      = var.leases_per_machine
    Namespace             = var.namespace
    AlarmTopicArn         = var.alarm_topic_arn
  }

  timeouts {
    create = "60m"
    update = "120m"
  }
}

output "stream_arn" {
  description = "The stream that is read; it outlives the stack."
  value       = aws_cloudformation_stack.fleet.outputs["StreamArn"]
}

output "group_name" {
  description = "The autoscaling group."
  value       = aws_cloudformation_stack.fleet.outputs["GroupName"]
}

output "role_arn" {
  description = "The role of the machines."
  value       = aws_cloudformation_stack.fleet.outputs["RoleArn"]
}
