// The words of the tab of chat.

import { pairs } from "./i18n.js";

export const words = pairs({
  chatHint: ["Each checkpoint gets a chat page of its own, on this machine only. It ends with the server of this page.", "每个检查点有自己的对话页面，只在本机可用，随本页面的服务器一起结束。"],
  chatNone: ["No run here has a checkpoint yet.", "这里还没有带检查点的运行。"],
  chatRun: ["Run", "运行"],
  chatCheckpoint: ["Checkpoint", "检查点"],
  chatStep: ["step {step}", "第 {step} 步"],
  chatStart: ["Load it", "加载"],
  chatOpen: ["Open the chat", "打开对话"],
  chatStop: ["Stop", "停止"],
  chat_starting: ["Loading the model…", "正在加载模型…"],
  chat_ended: ["It ended.", "已结束。"],
});
