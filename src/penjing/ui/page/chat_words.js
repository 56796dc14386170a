// The words of the tab of chat.

export const words = {
  en: {
    chatHint: "Each checkpoint gets a chat page of its own, on this machine only. It ends with the server of this page.",
    chatNone: "No run here has a checkpoint yet.",
    chatRun: "Run",
    chatCheckpoint: "Checkpoint",
    chatStep: "step {step}",
    chatStart: "Load it",
    chatOpen: "Open the chat",
    chatStop: "Stop",
    chat_starting: "Loading the model…",
    chat_ended: "It ended.",
  },
  zh: {
    chatHint: "每个检查点有自己的对话页面，只在本机可用，随本页面的服务器一起结束。",
    chatNone: "这里还没有带检查点的运行。",
    chatRun: "运行",
    chatCheckpoint: "检查点",
    chatStep: "第 {step} 步",
    chatStart: "加载",
    chatOpen: "打开对话",
    chatStop: "停止",
    chat_starting: "正在加载模型…",
    chat_ended: "已结束。",
  },
};
