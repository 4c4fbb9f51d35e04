"""Types of Kubernetes' objects. Made by scripts/api_types.py; `types` says how to read it."""

TABLE = """\
apiextensions_v1.CustomResourceColumnDefinition jsonPath=str! name=str! type=str! description=str format=str priority=int
apiextensions_v1.CustomResourceConversion strategy=str! webhook=apiextensions_v1.WebhookConversion
apiextensions_v1.CustomResourceDefinition spec=apiextensions_v1.CustomResourceDefinitionSpec! apiVersion=str kind=str metadata=meta_v1.ObjectMeta status=apiextensions_v1.CustomResourceDefinitionStatus
apiextensions_v1.CustomResourceDefinitionCondition status=str! type=str! lastTransitionTime=time message=str observedGeneration=int reason=str
apiextensions_v1.CustomResourceDefinitionNames kind=str! plural=str! categories=[str] listKind=str shortNames=[str] singular=str
apiextensions_v1.CustomResourceDefinitionSpec group=str! names=apiextensions_v1.CustomResourceDefinitionNames! scope=str! versions=[apiextensions_v1.CustomResourceDefinitionVersion]! conversion=apiextensions_v1.CustomResourceConversion preserveUnknownFields=bool
apiextensions_v1.CustomResourceDefinitionStatus acceptedNames=apiextensions_v1.CustomResourceDefinitionNames conditions=[apiextensions_v1.CustomResourceDefinitionCondition;type;type] observedGeneration=int storedVersions=[str]
apiextensions_v1.CustomResourceDefinitionVersion name=str! served=bool! storage=bool! additionalPrinterColumns=[apiextensions_v1.CustomResourceColumnDefinition] deprecated=bool deprecationWarning=str schema=apiextensions_v1.CustomResourceValidation selectableFields=[apiextensions_v1.SelectableField] subresources=apiextensions_v1.CustomResourceSubresources
apiextensions_v1.CustomResourceSubresourceScale specReplicasPath=str! statusReplicasPath=str! labelSelectorPath=str
apiextensions_v1.CustomResourceSubresources scale=apiextensions_v1.CustomResourceSubresourceScale status=any
apiextensions_v1.CustomResourceValidation openAPIV3Schema=any
apiextensions_v1.SelectableField jsonPath=str!
apiextensions_v1.ServiceReference name=str! namespace=str! path=str port=int
apiextensions_v1.WebhookClientConfig caBundle=str service=apiextensions_v1.ServiceReference url=str
apiextensions_v1.WebhookConversion conversionReviewVersions=[str]! clientConfig=apiextensions_v1.WebhookClientConfig
apps_v1.Deployment spec=apps_v1.DeploymentSpec! apiVersion=str kind=str metadata=meta_v1.ObjectMeta status=apps_v1.DeploymentStatus
apps_v1.DeploymentCondition lastTransitionTime=time lastUpdateTime=time message=str reason=str status=str type=str
apps_v1.DeploymentSpec selector=meta_v1.LabelSelector|atomic! template=core_v1.PodTemplateSpec! minReadySeconds=int paused=bool progressDeadlineSeconds=int replicas=int revisionHistoryLimit=int strategy=apps_v1.DeploymentStrategy
apps_v1.DeploymentStatus availableReplicas=int collisionCount=int conditions=[apps_v1.DeploymentCondition;type;type] observedGeneration=int readyReplicas=int replicas=int terminatingReplicas=int unavailableReplicas=int updatedReplicas=int
apps_v1.DeploymentStrategy rollingUpdate=apps_v1.RollingUpdateDeployment type=str
apps_v1.ReplicaSet spec=apps_v1.ReplicaSetSpec! apiVersion=str kind=str metadata=meta_v1.ObjectMeta status=apps_v1.ReplicaSetStatus
apps_v1.ReplicaSetCondition lastTransitionTime=time message=str reason=str status=str type=str
apps_v1.ReplicaSetSpec selector=meta_v1.LabelSelector|atomic! minReadySeconds=int replicas=int template=core_v1.PodTemplateSpec
apps_v1.ReplicaSetStatus replicas=int! availableReplicas=int conditions=[apps_v1.ReplicaSetCondition;type;type] fullyLabeledReplicas=int observedGeneration=int readyReplicas=int terminatingReplicas=int
apps_v1.RollingUpdateDeployment maxSurge=intstr maxUnavailable=intstr
autoscaling_v1.Scale apiVersion=str kind=str metadata=meta_v1.ObjectMeta spec=autoscaling_v1.ScaleSpec status=autoscaling_v1.ScaleStatus
autoscaling_v1.ScaleSpec replicas=int
autoscaling_v1.ScaleStatus replicas=int! selector=str
coordination_v1.Lease apiVersion=str kind=str metadata=meta_v1.ObjectMeta spec=coordination_v1.LeaseSpec
coordination_v1.LeaseSpec acquireTime=time holderIdentity=str leaseDurationSeconds=int leaseTransitions=int preferredHolder=str renewTime=time strategy=str
core_v1.AWSElasticBlockStoreVolumeSource volumeID=str! fsType=str partition=int readOnly=bool
core_v1.Affinity nodeAffinity=core_v1.NodeAffinity podAffinity=core_v1.PodAffinity podAntiAffinity=core_v1.PodAntiAffinity
core_v1.AppArmorProfile type=str! localhostProfile=str
core_v1.AttachedVolume devicePath=str! name=str!
core_v1.AzureDiskVolumeSource diskName=str! diskURI=str! cachingMode=str fsType=str kind=str readOnly=bool
core_v1.AzureFileVolumeSource secretName=str! shareName=str! readOnly=bool
core_v1.Binding target=core_v1.ObjectReference|atomic! apiVersion=str kind=str metadata=meta_v1.ObjectMeta
core_v1.CSIVolumeSource driver=str! fsType=str nodePublishSecretRef=core_v1.LocalObjectReference|atomic readOnly=bool volumeAttributes={str}
core_v1.Capabilities add=[str] drop=[str]
core_v1.CephFSVolumeSource monitors=[str]! path=str readOnly=bool secretFile=str secretRef=core_v1.LocalObjectReference|atomic user=str
core_v1.CinderVolumeSource volumeID=str! fsType=str readOnly=bool secretRef=core_v1.LocalObjectReference|atomic
core_v1.ClientIPConfig timeoutSeconds=int
core_v1.ClusterTrustBundleProjection path=str! labelSelector=meta_v1.LabelSelector|atomic name=str optional=bool signerName=str user=int
core_v1.ConfigMap apiVersion=str binaryData={bytes} data={str} immutable=bool kind=str metadata=meta_v1.ObjectMeta
core_v1.ConfigMapEnvSource name=str optional=bool
core_v1.ConfigMapKeySelector key=str! name=str optional=bool
core_v1.ConfigMapNodeConfigSource kubeletConfigKey=str! name=str! namespace=str! resourceVersion=str uid=str
core_v1.ConfigMapProjection items=[core_v1.KeyToPath] name=str optional=bool
core_v1.ConfigMapVolumeSource defaultMode=int defaultUser=int items=[core_v1.KeyToPath] name=str optional=bool
core_v1.Container name=str! args=[str] command=[str] env=[core_v1.EnvVar;name;name] envFrom=[core_v1.EnvFromSource] image=str imagePullPolicy=str lifecycle=core_v1.Lifecycle livenessProbe=core_v1.Probe ports=[core_v1.ContainerPort;containerPort;containerPort,protocol] readinessProbe=core_v1.Probe resizePolicy=[core_v1.ContainerResizePolicy] resources=core_v1.ResourceRequirements restartPolicy=str restartPolicyRules=[core_v1.ContainerRestartRule] securityContext=core_v1.SecurityContext startupProbe=core_v1.Probe stdin=bool stdinOnce=bool terminationMessagePath=str terminationMessagePolicy=str tty=bool volumeDevices=[core_v1.VolumeDevice;devicePath;devicePath] volumeMounts=[core_v1.VolumeMount;mountPath;mountPath] workingDir=str
core_v1.ContainerExtendedResourceRequest containerName=str! requestName=str! resourceName=str!
core_v1.ContainerImage names=[str] sizeBytes=int
core_v1.ContainerPort containerPort=int! hostIP=str hostPort=int name=str protocol=str
core_v1.ContainerResizePolicy resourceName=str! restartPolicy=str!
core_v1.ContainerRestartRule action=str! exitCodes=core_v1.ContainerRestartRuleOnExitCodes
core_v1.ContainerRestartRuleOnExitCodes operator=str! values=[int]
core_v1.ContainerState running=core_v1.ContainerStateRunning terminated=core_v1.ContainerStateTerminated waiting=core_v1.ContainerStateWaiting
core_v1.ContainerStateRunning startedAt=time
core_v1.ContainerStateTerminated exitCode=int! containerID=str finishedAt=time message=str reason=str signal=int startedAt=time
core_v1.ContainerStateWaiting message=str reason=str
core_v1.ContainerStatus image=str! imageID=str! name=str! ready=bool! restartCount=int! allocatedResources={quantity} allocatedResourcesStatus=[core_v1.ResourceStatus] containerID=str lastState=core_v1.ContainerState resources=core_v1.ResourceRequirements started=bool state=core_v1.ContainerState stopSignal=str user=core_v1.ContainerUser volumeMounts=[core_v1.VolumeMountStatus]
core_v1.ContainerUser linux=core_v1.LinuxContainerUser
core_v1.DaemonEndpoint Port=int!
core_v1.DownwardAPIProjection items=[core_v1.DownwardAPIVolumeFile]
core_v1.DownwardAPIVolumeFile path=str! fieldRef=core_v1.ObjectFieldSelector|atomic mode=int resourceFieldRef=core_v1.ResourceFieldSelector|atomic user=int
core_v1.DownwardAPIVolumeSource defaultMode=int defaultUser=int items=[core_v1.DownwardAPIVolumeFile]
core_v1.EmptyDirVolumeSource medium=str mode=int sizeLimit=quantity
core_v1.EndpointAddress ip=str! hostname=str nodeName=str targetRef=core_v1.ObjectReference|atomic
core_v1.EndpointPort port=int! appProtocol=str name=str protocol=str
core_v1.EndpointSubset addresses=[core_v1.EndpointAddress] notReadyAddresses=[core_v1.EndpointAddress] ports=[core_v1.EndpointPort]
core_v1.Endpoints apiVersion=str kind=str metadata=meta_v1.ObjectMeta subsets=[core_v1.EndpointSubset]
core_v1.EnvFromSource configMapRef=core_v1.ConfigMapEnvSource prefix=str secretRef=core_v1.SecretEnvSource
core_v1.EnvVar name=str! value=str valueFrom=core_v1.EnvVarSource
core_v1.EnvVarSource configMapKeyRef=core_v1.ConfigMapKeySelector|atomic fieldRef=core_v1.ObjectFieldSelector|atomic fileKeyRef=core_v1.FileKeySelector resourceFieldRef=core_v1.ResourceFieldSelector|atomic secretKeyRef=core_v1.SecretKeySelector|atomic
core_v1.EphemeralContainer name=str! args=[str] command=[str] env=[core_v1.EnvVar;name;name] envFrom=[core_v1.EnvFromSource] image=str imagePullPolicy=str lifecycle=core_v1.Lifecycle livenessProbe=core_v1.Probe ports=[core_v1.ContainerPort;containerPort;containerPort,protocol] readinessProbe=core_v1.Probe resizePolicy=[core_v1.ContainerResizePolicy] resources=core_v1.ResourceRequirements restartPolicy=str restartPolicyRules=[core_v1.ContainerRestartRule] securityContext=core_v1.SecurityContext startupProbe=core_v1.Probe stdin=bool stdinOnce=bool targetContainerName=str terminationMessagePath=str terminationMessagePolicy=str tty=bool volumeDevices=[core_v1.VolumeDevice;devicePath;devicePath] volumeMounts=[core_v1.VolumeMount;mountPath;mountPath] workingDir=str
core_v1.EphemeralVolumeSource volumeClaimTemplate=core_v1.PersistentVolumeClaimTemplate
core_v1.Event involvedObject=core_v1.ObjectReference|atomic! metadata=meta_v1.ObjectMeta! action=str apiVersion=str count=int eventTime=time firstTimestamp=time kind=str lastTimestamp=time message=str reason=str related=core_v1.ObjectReference|atomic reportingComponent=str reportingInstance=str series=core_v1.EventSeries source=core_v1.EventSource type=str
core_v1.EventSeries count=int lastObservedTime=time
core_v1.EventSource component=str host=str
core_v1.EvictionResponder name=str! priority=int!
core_v1.ExecAction command=[str]
core_v1.FCVolumeSource fsType=str lun=int readOnly=bool targetWWNs=[str] wwids=[str]
core_v1.FileKeySelector key=str! path=str! volumeName=str! optional=bool
core_v1.FlexVolumeSource driver=str! fsType=str options={str} readOnly=bool secretRef=core_v1.LocalObjectReference|atomic
core_v1.FlockerVolumeSource datasetName=str datasetUUID=str
core_v1.GCEPersistentDiskVolumeSource pdName=str! fsType=str partition=int readOnly=bool
core_v1.GRPCAction port=int! mode=str service=str
core_v1.GitRepoVolumeSource repository=str! directory=str revision=str
core_v1.GlusterfsVolumeSource endpoints=str! path=str! readOnly=bool
core_v1.HTTPGetAction port=intstr! host=str httpHeaders=[core_v1.HTTPHeader] path=str protocol=str scheme=str
core_v1.HTTPHeader name=str! value=str!
core_v1.HostAlias ip=str! hostnames=[str]
core_v1.HostIP ip=str!
core_v1.HostPathVolumeSource path=str! type=str
core_v1.ISCSIVolumeSource iqn=str! lun=int! targetPortal=str! chapAuthDiscovery=bool chapAuthSession=bool fsType=str initiatorName=str iscsiInterface=str portals=[str] readOnly=bool secretRef=core_v1.LocalObjectReference|atomic
core_v1.ImageVolumeSource pullPolicy=str reference=str
core_v1.ImageVolumeStatus imageRef=str!
core_v1.KeyToPath key=str! path=str! mode=int user=int
core_v1.Lifecycle postStart=core_v1.LifecycleHandler preStop=core_v1.LifecycleHandler stopSignal=str
core_v1.LifecycleHandler exec=core_v1.ExecAction httpGet=core_v1.HTTPGetAction sleep=core_v1.SleepAction tcpSocket=core_v1.TCPSocketAction
core_v1.LinuxContainerUser gid=int! uid=int! supplementalGroups=[int]
core_v1.LoadBalancerIngress hostname=str ip=str ipMode=str ports=[core_v1.PortStatus]
core_v1.LoadBalancerStatus ingress=[core_v1.LoadBalancerIngress]
core_v1.LocalObjectReference name=str
core_v1.NFSVolumeSource path=str! server=str! readOnly=bool
core_v1.Namespace apiVersion=str kind=str metadata=meta_v1.ObjectMeta spec=core_v1.NamespaceSpec status=core_v1.NamespaceStatus
core_v1.NamespaceCondition status=str! type=str! lastTransitionTime=time message=str reason=str
core_v1.NamespaceSpec finalizers=[str]
core_v1.NamespaceStatus conditions=[core_v1.NamespaceCondition;type;type] phase=str
core_v1.Node apiVersion=str kind=str metadata=meta_v1.ObjectMeta spec=core_v1.NodeSpec status=core_v1.NodeStatus
core_v1.NodeAddress address=str! type=str!
core_v1.NodeAffinity preferredDuringSchedulingIgnoredDuringExecution=[core_v1.PreferredSchedulingTerm] requiredDuringSchedulingIgnoredDuringExecution=core_v1.NodeSelector|atomic
core_v1.NodeAllocatableMappedResources name=str! quantity=quantity!
core_v1.NodeAllocatableOverheadResources name=str! perContainer=quantity perPod=quantity
core_v1.NodeAllocatableResourceClaimStatus resourceClaimName=str! containers=[str] mapping=[core_v1.NodeAllocatableMappedResources] overhead=[core_v1.NodeAllocatableOverheadResources]
core_v1.NodeCondition status=str! type=str! lastHeartbeatTime=time lastTransitionTime=time message=str reason=str
core_v1.NodeConfigSource configMap=core_v1.ConfigMapNodeConfigSource
core_v1.NodeConfigStatus active=core_v1.NodeConfigSource assigned=core_v1.NodeConfigSource error=str lastKnownGood=core_v1.NodeConfigSource
core_v1.NodeDaemonEndpoints kubeletEndpoint=core_v1.DaemonEndpoint
core_v1.NodeFeatures supplementalGroupsPolicy=bool
core_v1.NodePodPreemptionPolicy disableResizePreemption=[str]
core_v1.NodeRuntimeHandler features=core_v1.NodeRuntimeHandlerFeatures name=str
core_v1.NodeRuntimeHandlerFeatures recursiveReadOnlyMounts=bool userNamespaces=bool
core_v1.NodeSelector nodeSelectorTerms=[core_v1.NodeSelectorTerm|atomic]!
core_v1.NodeSelectorRequirement key=str! operator=str! values=[str]
core_v1.NodeSelectorTerm matchExpressions=[core_v1.NodeSelectorRequirement] matchFields=[core_v1.NodeSelectorRequirement]
core_v1.NodeSpec configSource=core_v1.NodeConfigSource externalID=str podCIDR=str podCIDRs=[str;=;=] podPreemptionPolicy=core_v1.NodePodPreemptionPolicy providerID=str taints=[core_v1.Taint] unschedulable=bool
core_v1.NodeStatus addresses=[core_v1.NodeAddress;type;type] allocatable={quantity} capacity={quantity} conditions=[core_v1.NodeCondition;type;type] config=core_v1.NodeConfigStatus daemonEndpoints=core_v1.NodeDaemonEndpoints declaredFeatures=[str] features=core_v1.NodeFeatures images=[core_v1.ContainerImage] nodeInfo=core_v1.NodeSystemInfo phase=str runtimeHandlers=[core_v1.NodeRuntimeHandler] volumesAttached=[core_v1.AttachedVolume] volumesInUse=[str]
core_v1.NodeSwapStatus capacity=int
core_v1.NodeSystemInfo architecture=str! bootID=str! containerRuntimeVersion=str! kernelVersion=str! kubeProxyVersion=str! kubeletVersion=str! machineID=str! operatingSystem=str! osImage=str! systemUUID=str! runningInUserNamespace=bool swap=core_v1.NodeSwapStatus
core_v1.ObjectFieldSelector fieldPath=str! apiVersion=str
core_v1.ObjectReference apiVersion=str fieldPath=str kind=str name=str namespace=str resourceVersion=str uid=str
core_v1.PersistentVolumeClaimSpec accessModes=[str] dataSource=core_v1.TypedLocalObjectReference|atomic dataSourceRef=core_v1.TypedObjectReference resources=core_v1.VolumeResourceRequirements selector=meta_v1.LabelSelector|atomic storageClassName=str volumeAttributesClassName=str volumeMode=str volumeName=str
core_v1.PersistentVolumeClaimTemplate spec=core_v1.PersistentVolumeClaimSpec! metadata=meta_v1.ObjectMeta
core_v1.PersistentVolumeClaimVolumeSource claimName=str! readOnly=bool
core_v1.PhotonPersistentDiskVolumeSource pdID=str! fsType=str
core_v1.Pod apiVersion=str kind=str metadata=meta_v1.ObjectMeta spec=core_v1.PodSpec status=core_v1.PodStatus
core_v1.PodAffinity preferredDuringSchedulingIgnoredDuringExecution=[core_v1.WeightedPodAffinityTerm] requiredDuringSchedulingIgnoredDuringExecution=[core_v1.PodAffinityTerm]
core_v1.PodAffinityTerm topologyKey=str! labelSelector=meta_v1.LabelSelector|atomic matchLabelKeys=[str] mismatchLabelKeys=[str] namespaceSelector=meta_v1.LabelSelector|atomic namespaces=[str]
core_v1.PodAntiAffinity preferredDuringSchedulingIgnoredDuringExecution=[core_v1.WeightedPodAffinityTerm] requiredDuringSchedulingIgnoredDuringExecution=[core_v1.PodAffinityTerm]
core_v1.PodCertificateProjection keyType=str! signerName=str! certificateChainPath=str credentialBundlePath=str keyPath=str maxExpirationSeconds=int user=int userAnnotations={str}
core_v1.PodCondition status=str! type=str! lastProbeTime=time lastTransitionTime=time message=str observedGeneration=int reason=str
core_v1.PodDNSConfig nameservers=[str] options=[core_v1.PodDNSConfigOption] searches=[str]
core_v1.PodDNSConfigOption name=str value=str
core_v1.PodExtendedResourceClaimStatus requestMappings=[core_v1.ContainerExtendedResourceRequest]! resourceClaimName=str!
core_v1.PodIP ip=str!
core_v1.PodOS name=str!
core_v1.PodReadinessGate conditionType=str!
core_v1.PodResourceClaim name=str! resourceClaimName=str resourceClaimTemplateName=str
core_v1.PodResourceClaimStatus name=str! resourceClaimName=str
core_v1.PodSchedulingGate name=str!
core_v1.PodSchedulingGroup podGroupName=str
core_v1.PodSecurityContext appArmorProfile=core_v1.AppArmorProfile fsGroup=int fsGroupChangePolicy=str runAsGroup=int runAsNonRoot=bool runAsUser=int seLinuxChangePolicy=str seLinuxOptions=core_v1.SELinuxOptions seccompProfile=core_v1.SeccompProfile supplementalGroups=[int] supplementalGroupsPolicy=str sysctls=[core_v1.Sysctl] windowsOptions=core_v1.WindowsSecurityContextOptions
core_v1.PodSpec containers=[core_v1.Container;name;name]! activeDeadlineSeconds=int affinity=core_v1.Affinity automountServiceAccountToken=bool dnsConfig=core_v1.PodDNSConfig dnsPolicy=str enableServiceLinks=bool ephemeralContainers=[core_v1.EphemeralContainer;name;name] evictionResponders=[core_v1.EvictionResponder] hostAliases=[core_v1.HostAlias;ip;ip] hostIPC=bool hostNetwork=bool hostPID=bool hostUsers=bool hostname=str hostnameOverride=str imagePullSecrets=[core_v1.LocalObjectReference|atomic;name;name] initContainers=[core_v1.Container;name;name] nodeName=str nodeSelector={str}|atomic os=core_v1.PodOS overhead={quantity} preemptionPolicy=str priority=int priorityClassName=str readinessGates=[core_v1.PodReadinessGate] resourceClaims=[core_v1.PodResourceClaim;name;name] resources=core_v1.ResourceRequirements restartPolicy=str runtimeClassName=str schedulerName=str schedulingGates=[core_v1.PodSchedulingGate;name;name] schedulingGroup=core_v1.PodSchedulingGroup securityContext=core_v1.PodSecurityContext serviceAccount=str serviceAccountName=str setHostnameAsFQDN=bool shareProcessNamespace=bool subdomain=str terminationGracePeriodSeconds=int tolerations=[core_v1.Toleration] topologySpreadConstraints=[core_v1.TopologySpreadConstraint;topologyKey;topologyKey,whenUnsatisfiable] volumes=[core_v1.Volume;name;name]
core_v1.PodStatus allocatedResources={quantity} conditions=[core_v1.PodCondition;type;type] containerStatuses=[core_v1.ContainerStatus] ephemeralContainerStatuses=[core_v1.ContainerStatus] extendedResourceClaimStatus=core_v1.PodExtendedResourceClaimStatus hostIP=str hostIPs=[core_v1.HostIP] initContainerStatuses=[core_v1.ContainerStatus] message=str nodeAllocatableResourceClaimStatuses=[core_v1.NodeAllocatableResourceClaimStatus] nominatedNodeName=str observedGeneration=int phase=str podIP=str podIPs=[core_v1.PodIP;ip;ip] qosClass=str reason=str resize=str resourceClaimStatuses=[core_v1.PodResourceClaimStatus] resources=core_v1.ResourceRequirements startTime=time volumeHealth=[core_v1.PodVolumeHealth]
core_v1.PodTemplateSpec metadata=meta_v1.ObjectMeta spec=core_v1.PodSpec
core_v1.PodVolumeHealth name=str! healthConditions=[core_v1.VolumeHealthCondition] lastTransitionTime=time
core_v1.PortStatus port=int! protocol=str! error=str
core_v1.PortworxVolumeSource volumeID=str! fsType=str readOnly=bool
core_v1.PreferredSchedulingTerm preference=core_v1.NodeSelectorTerm|atomic! weight=int!
core_v1.Probe exec=core_v1.ExecAction failureThreshold=int grpc=core_v1.GRPCAction httpGet=core_v1.HTTPGetAction initialDelaySeconds=int periodSeconds=int successThreshold=int tcpSocket=core_v1.TCPSocketAction terminationGracePeriodSeconds=int timeoutSeconds=int
core_v1.ProjectedVolumeSource defaultMode=int defaultUser=int sources=[core_v1.VolumeProjection]
core_v1.QuobyteVolumeSource registry=str! volume=str! group=str readOnly=bool tenant=str user=str
core_v1.RBDVolumeSource image=str! monitors=[str]! fsType=str keyring=str pool=str readOnly=bool secretRef=core_v1.LocalObjectReference|atomic user=str
core_v1.ResourceClaim name=str! request=str
core_v1.ResourceFieldSelector resource=str! containerName=str divisor=quantity
core_v1.ResourceHealth resourceID=str! health=str message=str
core_v1.ResourceRequirements claims=[core_v1.ResourceClaim] limits={quantity} requests={quantity}
core_v1.ResourceStatus name=str! resources=[core_v1.ResourceHealth]
core_v1.SELinuxOptions level=str role=str type=str user=str
core_v1.ScaleIOVolumeSource gateway=str! secretRef=core_v1.LocalObjectReference|atomic! system=str! fsType=str protectionDomain=str readOnly=bool sslEnabled=bool storageMode=str storagePool=str volumeName=str
core_v1.SeccompProfile type=str! localhostProfile=str
core_v1.Secret apiVersion=str data={bytes} immutable=bool kind=str metadata=meta_v1.ObjectMeta stringData={str} type=str
core_v1.SecretEnvSource name=str optional=bool
core_v1.SecretKeySelector key=str! name=str optional=bool
core_v1.SecretProjection items=[core_v1.KeyToPath] name=str optional=bool
core_v1.SecretVolumeSource defaultMode=int defaultUser=int items=[core_v1.KeyToPath] optional=bool secretName=str
core_v1.SecurityContext allowPrivilegeEscalation=bool appArmorProfile=core_v1.AppArmorProfile capabilities=core_v1.Capabilities privileged=bool procMount=str readOnlyRootFilesystem=bool runAsGroup=int runAsNonRoot=bool runAsUser=int seLinuxOptions=core_v1.SELinuxOptions seccompProfile=core_v1.SeccompProfile windowsOptions=core_v1.WindowsSecurityContextOptions
core_v1.Service apiVersion=str kind=str metadata=meta_v1.ObjectMeta spec=core_v1.ServiceSpec status=core_v1.ServiceStatus
core_v1.ServiceAccount apiVersion=str automountServiceAccountToken=bool imagePullSecrets=[core_v1.LocalObjectReference|atomic] kind=str metadata=meta_v1.ObjectMeta secrets=[core_v1.ObjectReference|atomic;name;name]
core_v1.ServiceAccountTokenProjection path=str! audience=str expirationSeconds=int user=int
core_v1.ServicePort port=int! appProtocol=str name=str nodePort=int protocol=str targetPort=intstr
core_v1.ServiceSpec allocateLoadBalancerNodePorts=bool clusterIP=str clusterIPs=[str] externalIPs=[str] externalName=str externalTrafficPolicy=str healthCheckNodePort=int internalTrafficPolicy=str ipFamilies=[str] ipFamilyPolicy=str loadBalancerClass=str loadBalancerIP=str loadBalancerSourceRanges=[str] ports=[core_v1.ServicePort;port;port,protocol] publishNotReadyAddresses=bool selector={str}|atomic sessionAffinity=str sessionAffinityConfig=core_v1.SessionAffinityConfig trafficDistribution=str type=str
core_v1.ServiceStatus conditions=[meta_v1.Condition;type;type] loadBalancer=core_v1.LoadBalancerStatus
core_v1.SessionAffinityConfig clientIP=core_v1.ClientIPConfig
core_v1.SleepAction seconds=int!
core_v1.StorageOSVolumeSource fsType=str readOnly=bool secretRef=core_v1.LocalObjectReference|atomic volumeName=str volumeNamespace=str
core_v1.Sysctl name=str! value=str!
core_v1.TCPSocketAction port=intstr! host=str
core_v1.Taint effect=str! key=str! timeAdded=time value=str
core_v1.Toleration effect=str key=str operator=str tolerationSeconds=int value=str
core_v1.TopologySpreadConstraint maxSkew=int! topologyKey=str! whenUnsatisfiable=str! labelSelector=meta_v1.LabelSelector|atomic matchLabelKeys=[str] minDomains=int nodeAffinityPolicy=str nodeTaintsPolicy=str
core_v1.TypedLocalObjectReference kind=str! name=str! apiGroup=str
core_v1.TypedObjectReference kind=str! name=str! apiGroup=str namespace=str
core_v1.Volume name=str! awsElasticBlockStore=core_v1.AWSElasticBlockStoreVolumeSource azureDisk=core_v1.AzureDiskVolumeSource azureFile=core_v1.AzureFileVolumeSource cephfs=core_v1.CephFSVolumeSource cinder=core_v1.CinderVolumeSource configMap=core_v1.ConfigMapVolumeSource csi=core_v1.CSIVolumeSource downwardAPI=core_v1.DownwardAPIVolumeSource emptyDir=core_v1.EmptyDirVolumeSource ephemeral=core_v1.EphemeralVolumeSource fc=core_v1.FCVolumeSource flexVolume=core_v1.FlexVolumeSource flocker=core_v1.FlockerVolumeSource gcePersistentDisk=core_v1.GCEPersistentDiskVolumeSource gitRepo=core_v1.GitRepoVolumeSource glusterfs=core_v1.GlusterfsVolumeSource hostPath=core_v1.HostPathVolumeSource image=core_v1.ImageVolumeSource iscsi=core_v1.ISCSIVolumeSource nfs=core_v1.NFSVolumeSource persistentVolumeClaim=core_v1.PersistentVolumeClaimVolumeSource photonPersistentDisk=core_v1.PhotonPersistentDiskVolumeSource portworxVolume=core_v1.PortworxVolumeSource projected=core_v1.ProjectedVolumeSource quobyte=core_v1.QuobyteVolumeSource rbd=core_v1.RBDVolumeSource scaleIO=core_v1.ScaleIOVolumeSource secret=core_v1.SecretVolumeSource storageos=core_v1.StorageOSVolumeSource vsphereVolume=core_v1.VsphereVirtualDiskVolumeSource
core_v1.VolumeDevice devicePath=str! name=str!
core_v1.VolumeHealthCondition reason=str! status=str! message=str
core_v1.VolumeMount mountPath=str! name=str! bindMountOptions=[str] mountPropagation=str readOnly=bool recursiveReadOnly=str subPath=str subPathExpr=str
core_v1.VolumeMountStatus mountPath=str! name=str! readOnly=bool recursiveReadOnly=str volumeStatus=core_v1.VolumeStatus
core_v1.VolumeProjection clusterTrustBundle=core_v1.ClusterTrustBundleProjection configMap=core_v1.ConfigMapProjection downwardAPI=core_v1.DownwardAPIProjection podCertificate=core_v1.PodCertificateProjection secret=core_v1.SecretProjection serviceAccountToken=core_v1.ServiceAccountTokenProjection
core_v1.VolumeResourceRequirements limits={quantity} requests={quantity}
core_v1.VolumeStatus image=core_v1.ImageVolumeStatus
core_v1.VsphereVirtualDiskVolumeSource volumePath=str! fsType=str storagePolicyID=str storagePolicyName=str
core_v1.WeightedPodAffinityTerm podAffinityTerm=core_v1.PodAffinityTerm! weight=int!
core_v1.WindowsSecurityContextOptions gmsaCredentialSpec=str gmsaCredentialSpecName=str hostProcess=bool runAsUserName=str
discovery_v1.Endpoint addresses=[str]! conditions=discovery_v1.EndpointConditions deprecatedTopology={str}|atomic hints=discovery_v1.EndpointHints hostname=str nodeName=str targetRef=core_v1.ObjectReference|atomic zone=str
discovery_v1.EndpointConditions ready=bool serving=bool terminating=bool
discovery_v1.EndpointHints forNodes=[discovery_v1.ForNode] forZones=[discovery_v1.ForZone]
discovery_v1.EndpointPort appProtocol=str name=str port=int protocol=str
discovery_v1.EndpointSlice addressType=str! apiVersion=str endpoints=[discovery_v1.Endpoint] kind=str metadata=meta_v1.ObjectMeta ports=[discovery_v1.EndpointPort]
discovery_v1.ForNode name=str!
discovery_v1.ForZone name=str!
events_v1.Event eventTime=time! action=str apiVersion=str deprecatedCount=int deprecatedFirstTimestamp=time deprecatedLastTimestamp=time deprecatedSource=core_v1.EventSource kind=str metadata=meta_v1.ObjectMeta note=str reason=str regarding=core_v1.ObjectReference|atomic related=core_v1.ObjectReference|atomic reportingController=str reportingInstance=str series=events_v1.EventSeries type=str
events_v1.EventSeries count=int! lastObservedTime=time!
meta_v1.Condition lastTransitionTime=time! message=str! reason=str! status=str! type=str! observedGeneration=int
meta_v1.DeleteOptions apiVersion=str dryRun=[str] gracePeriodSeconds=int ignoreStoreReadErrorWithClusterBreakingPotential=bool kind=str orphanDependents=bool preconditions=meta_v1.Preconditions propagationPolicy=str
meta_v1.LabelSelector matchExpressions=[meta_v1.LabelSelectorRequirement] matchLabels={str}
meta_v1.LabelSelectorRequirement key=str! operator=str! values=[str]
meta_v1.ListMeta continue_=str remainingItemCount=int resourceVersion=str selfLink=str shardInfo=meta_v1.ShardInfo
meta_v1.ManagedFieldsEntry apiVersion=str fieldsType=str fieldsV1=any manager=str operation=str subresource=str time=time
meta_v1.ObjectMeta annotations={str} creationTimestamp=time deletionGracePeriodSeconds=int deletionTimestamp=time finalizers=[str;=;=] generateName=str generation=int labels={str} managedFields=[meta_v1.ManagedFieldsEntry] name=str namespace=str ownerReferences=[meta_v1.OwnerReference;uid;uid] resourceVersion=str selfLink=str uid=str
meta_v1.OwnerReference apiVersion=str! kind=str! name=str! uid=str! blockOwnerDeletion=bool controller=bool
meta_v1.Preconditions resourceVersion=str uid=str
meta_v1.ShardInfo selector=str!
meta_v1.Status apiVersion=str code=int details=meta_v1.StatusDetails kind=str message=str metadata=meta_v1.ListMeta reason=str status=str
meta_v1.StatusCause field=str message=str reason=str
meta_v1.StatusDetails causes=[meta_v1.StatusCause] group=str kind=str name=str retryAfterSeconds=int uid=str
networking_v1.IPAddress spec=networking_v1.IPAddressSpec! apiVersion=str kind=str metadata=meta_v1.ObjectMeta
networking_v1.IPAddressSpec parentRef=networking_v1.ParentReference!
networking_v1.ParentReference name=str! resource=str! group=str namespace=str
networking_v1.ServiceCIDR apiVersion=str kind=str metadata=meta_v1.ObjectMeta spec=networking_v1.ServiceCIDRSpec status=networking_v1.ServiceCIDRStatus
networking_v1.ServiceCIDRSpec cidrs=[str]
networking_v1.ServiceCIDRStatus conditions=[meta_v1.Condition;type;type]
"""
